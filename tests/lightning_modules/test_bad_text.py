"""Bad text is left out and named, or refused: before training where it can be seen, else by an end of all ranks."""

import functools
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import ConfigurationError
from lightning_megatron.data.null_tokenizer import NullTokenizer
from lightning_megatron.lightning_modules import BlendSource, GPTModule, StreamingConfig, corpus_data
from tests.harness.ranks import RankFailed, run_on_ranks
from tests.lightning_modules.corpus import config, data
from tests.lightning_modules.test_sources import write_tokens
from tests.trainer.layouts import PLAIN, QUIET, Layout, make_trainer

pytestmark = pytest.mark.filterwarnings(QUIET)


def write_numbers(folder: Path, bad: dict[int, str] | None = None, num_rows: int = 400) -> Path:
    """JSON lines of numbers; some lines are others."""
    lines = [json.dumps({"text": " ".join(str((i + j) % 290) for j in range(20))}) for i in range(num_rows)]
    for number, line in (bad or {}).items():
        lines[number] = line
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


def streamed(folder: Path, **options: Any) -> Any:
    defaults = {"path": str(folder / "rows.jsonl"), "tokenizer": "null:290", "streaming": StreamingConfig()}
    return data(folder, **(defaults | {"epoch_samples": 400} | options))


def faults_of(module: Any) -> str:
    with pytest.raises(ConfigurationError) as shown:
        module.setup("fit")
    return str(shown.value)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_column_of_no_text_is_reported_before_training(tmp_path: Path, is_streamed: bool) -> None:
    write_numbers(tmp_path)
    (tmp_path / "numbers.jsonl").write_text('{"text": 1}\n{"text": 2}\n')
    made = streamed if is_streamed else functools.partial(data, tokenizer="null:290")
    assert "numbers.jsonl" in faults_of(made(tmp_path, path=str(tmp_path / "numbers.jsonl")))
    shown = faults_of(made(tmp_path, path=str(tmp_path / "rows.jsonl"), text_column="body"))
    assert "text_column ('body') is not a column of" in shown and "rows.jsonl" in shown


def test_a_stream_of_nothing_but_bad_text_is_reported_before_training(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text"\n[1]\n')
    assert "holds no document that can be read" in faults_of(streamed(tmp_path))
    write_numbers(tmp_path, {0: '{"text": 5}'})
    assert "text_column ('text') must hold text, and a document is not text but 5" in faults_of(streamed(tmp_path))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_lines_of_a_stream_are_left_out(tmp_path: Path, num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    write_numbers(tmp_path, {7: '{"text"', 11: '{"text": 3}'})
    module = streamed(tmp_path, num_workers=num_workers, epoch_samples=40)
    module.trainer = make_trainer(PLAIN)
    module.setup("fit")
    with caplog.at_level(logging.WARNING):
        assert len(list(module.train_dataloader())) == 10
    if not num_workers:
        assert "is not JSON" in caplog.text and "line 8" in caplog.text and "line 12" in caplog.text


# Enough to read some seventy rows of what `write_numbers` writes.
STEPS = 24


def fit(folder: Path, layout: Layout, **options: Any) -> str:
    """What ends a run."""
    module = streamed(folder, **options)
    trainer = make_trainer(layout, max_steps=STEPS, max_epochs=1, limit_val_batches=0)
    try:
        trainer.fit(GPTModule(config(num_layers=1)), datamodule=module)
    except ConfigurationError as error:
        return str(error)
    return f"{trainer.global_step} steps"


def fit_in_windows(folder: Path, layout: Layout, choice: str, num_workers: int) -> str:
    options = {"streaming": StreamingConfig(window_documents=8), "num_workers": num_workers}
    shown = fit(folder, layout, bad_documents=choice, **options)
    if "steps" not in shown:
        raise ConfigurationError([shown])
    return shown


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_line_that_is_refused_ends_all_ranks_with_its_name(tmp_path: Path, num_workers: int) -> None:
    # Behind what is read before training.
    write_numbers(tmp_path, {60: '{"text": "broken'})
    # Who has other packers reads the line a little earlier or later.
    with pytest.raises(RankFailed) as ended:
        run_on_ranks(2, fit_in_windows, tmp_path, Layout(world=2), "refuse", num_workers, init=False)
    shown = str(ended.value)
    assert f"a document is not JSON ({tmp_path}/rows.jsonl, line 61: " in shown and "bad_documents='skip'" in shown
    [shown] = run_on_ranks(1, fit_in_windows, tmp_path, Layout(), "skip", num_workers, init=False)
    assert shown == f"{STEPS} steps"


def test_a_document_that_the_tokenizer_refuses_is_named_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_numbers(tmp_path, {7: '{"text": "1 2 nine"}'}, num_rows=60)
    with caplog.at_level(logging.WARNING):
        assert fit(tmp_path, PLAIN, epoch_samples=80) == "20 steps"
    assert "is refused by the tokenizer" in caplog.text and "1 2 nine" in caplog.text
    assert "is refused by the tokenizer" in fit(tmp_path, PLAIN, epoch_samples=80, bad_documents="refuse")


@pytest.mark.parametrize("choice", ["skip", "refuse"])
def test_files_that_are_prepared_follow_the_same_option(
    tmp_path: Path, choice: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "texts").mkdir()
    write_numbers(tmp_path / "texts", {7: '{"text"', 11: '{"text": 3}'}, num_rows=20)
    options: dict[str, Any] = {"tokenizer": "null:290", "max_document_bytes": 90, "validation_fraction": 0.0}
    module = data(tmp_path, path=str(tmp_path / "texts"), bad_documents=choice, **options)
    (tmp_path / "texts" / "latin.txt").write_bytes(b"1 \xe9")
    (tmp_path / "texts" / "long.txt").write_text("1 " * 50)
    wanted = ("latin.txt", "line 8", "line 12", "has 100 bytes, above max_document_bytes (90)")
    if choice == "refuse":
        shown = faults_of(module)
        assert "latin.txt" in shown and "has 100 bytes" in shown
        return
    with caplog.at_level(logging.WARNING):
        module.setup("fit")
    assert "were left without tokens" in caplog.text
    assert all(name in caplog.text for name in wanted)
    caplog.clear()
    # A later run finds all in the cache, and reports it too.
    again = data(tmp_path, path=str(tmp_path / "texts"), bad_documents=choice, **options)
    with caplog.at_level(logging.INFO):
        again.setup("fit")
    [shown] = [message for message in caplog.messages if message.startswith("training: ")]
    assert all(name in shown for name in wanted)


@pytest.mark.parametrize("is_blended", [True, False])
def test_bad_text_is_reported_for_each_part_of_the_documents(
    tmp_path: Path, is_blended: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sources = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        path = write_numbers(tmp_path / name, {7: '{"text"', 16: "[]", 18: "5"}, num_rows=20)
        sources.append(BlendSource(path=str(path), weight=1))
    options: dict[str, Any] = {"path": None, "blend": sources} if is_blended else {"path": sources[0].path}
    module = data(tmp_path, tokenizer="null:290", document_split="8,1,1", **options)
    with caplog.at_level(logging.INFO):
        module.setup("fit")
    for what, line in (("training", 8), ("validation", 17), ("test", 19)):
        [shown] = [message for message in caplog.messages if message.startswith(f"{what}: ")]
        for source in sources[: 1 + is_blended]:
            assert f"{source.path}, line {line}" in shown


def test_a_prompt_that_the_tokenizer_refuses_is_reported_before_a_model_is_there(tmp_path: Path) -> None:
    path = str(write_numbers(tmp_path, num_rows=20))
    with pytest.raises(ConfigurationError, match=r"'hello'.* must be a number from 0 to 289"):
        data(tmp_path, path=path, tokenizer="null:290", prompts=["hello"]).setup("predict")


def test_wrong_options_are_reported_with_the_others(tmp_path: Path) -> None:
    faults = "\n".join(data(tmp_path, bad_documents="ignore", max_document_bytes=0, sequence_length=0).faults())
    assert "bad_documents ('ignore') must be one of 'skip', 'refuse'" in faults
    assert "max_document_bytes (0) must be at least 1" in faults and "sequence_length (0)" in faults


# --- what is held out -------------------------------------------------------------------------------------------------


def test_ways_to_hold_out_do_not_overrule_each_other(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "tokens")
    shown = "all say what is held out; give one of them"
    for options in (
        {"validation_fraction": 0.1, "document_split": "8,1,1"},
        {"validation_fraction": 0.1, "validation_path": prefix},
        {"document_split": "8,1,1", "validation_path": prefix},
    ):
        [fault] = data(tmp_path, path=prefix, **options).faults()
        assert shown in fault and all(name in fault for name in options)
    [fault] = streamed(tmp_path, path=str(tmp_path / "corpus"), validation_fraction=0.1).faults()
    assert fault.startswith("validation_fraction (0.1) counts documents, which a stream does not")


@pytest.mark.parametrize("is_text", [True, False])
def test_too_little_that_is_held_out_is_reported_by_options_that_there_are(tmp_path: Path, is_text: bool) -> None:
    write_numbers(tmp_path, num_rows=20)
    path = str(tmp_path / "rows.jsonl") if is_text else write_tokens(tmp_path / "tokens", num_documents=20)
    options: dict[str, Any] = {
        "path": path,
        "tokenizer": "null:290",
        "sequence_length": 100,
        "validation_fraction": 0.05,
    }
    shown = faults_of(data(tmp_path, **options))
    assert "1 of 20 documents are held out by validation_fraction (0.05; 0 holds out none): " in shown
    assert "num_samples" not in shown
    options = {**options, "validation_fraction": None, "document_split": "18,1,1"}
    shown = faults_of(data(tmp_path, **options))
    assert "1 of 20 documents are for validation by document_split ('18,1,1'): " in shown


def test_a_source_of_a_blend_with_nothing_to_hold_out_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18")
    write_numbers(tmp_path)
    sources = [BlendSource(path=str(tmp_path / name), weight=1) for name in ("one.txt", "rows.jsonl")]
    shown = faults_of(data(tmp_path, path=None, blend=sources, tokenizer="null:290"))
    assert f"of the blend {tmp_path}/one.txt has too little" in shown and "validation_fraction=0" in shown
    data(tmp_path, path=None, blend=sources, tokenizer="null:290", validation_fraction=0.0).setup("fit")


# --- where indices lie ------------------------------------------------------------------------------------------------


def test_token_files_in_a_folder_that_nobody_may_write_to_are_trained_on(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    prefix = write_tokens(tmp_path / "tokens" / "text")
    other = tmp_path / "others"
    other.mkdir()
    second = write_tokens(other / "text", first=100)
    written = Path(f"{prefix}.idx").stat().st_mtime_ns
    os.utime(f"{second}.idx", ns=(written, written))
    (tmp_path / "tokens").chmod(stat.S_IRUSR | stat.S_IXUSR)
    samples = {}
    for path in (prefix, second):
        for packing in ("stream", "documents"):
            module = data(tmp_path, path=path, packing=packing, tokenizer="null:9", vocab_size=300, sequence_length=8)
            module.setup("fit")
            assert module._training is not None
            samples[path, packing] = module._training.dataset[0]["tokens"].tolist()
    assert sorted(os.listdir(tmp_path / "tokens")) == sorted(os.listdir(other)) == ["text.bin", "text.idx"]
    assert len(list((tmp_path / "cache").glob("text.*.npy"))) == 10
    assert all(max(samples[prefix, kind]) < 100 <= max(samples[second, kind]) for kind in ("stream", "documents"))


# --- resuming ---------------------------------------------------------------------------------------------------------


def resumed(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> str:
    """What becomes of a run that is resumed with other options."""

    def run(options: dict[str, Any], max_steps: int, ckpt_path: Path | None = None) -> Any:
        saver = ModelCheckpoint(folder / "saved", filename="{step}", every_n_train_steps=2, save_top_k=-1)
        trainer = make_trainer(
            Layout(),
            max_steps=max_steps,
            max_epochs=9,
            limit_val_batches=0,
            enable_checkpointing=True,
            callbacks=[saver],
        )
        trainer.fit(GPTModule(config(num_layers=1)), datamodule=data(folder, **options), ckpt_path=ckpt_path)

    run(first, 2)
    try:
        run(second, 4, folder / "saved" / "step=2.ckpt")
    except ConfigurationError as error:
        return str(error)
    return "resumed"


SOURCES: dict[str, dict[str, Any]] = {
    "stream": {"streaming": StreamingConfig(), "epoch_samples": 400},
    "larger stream": {"streaming": StreamingConfig(), "epoch_samples": 400, "global_batch_size": 8},
    "path": {},
    "blend": {"path": None, "epoch_samples": 400},
}
TOLD = {
    ("stream", "path"): "is of a run whose text streamed",
    ("stream", "blend"): "is of a run whose text streamed",
    ("path", "stream"): "is of a run whose text did not stream",
    ("blend", "stream"): "is of a run whose text did not stream",
    ("stream", "larger stream"): "was split over 4 packers, and this run has 8",
    ("stream", "stream"): "resumed",
}


@pytest.mark.parametrize("pair", TOLD, ids=" to ".join)
def test_a_position_in_one_kind_of_source_is_refused_by_another(
    tmp_path: Path, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_numbers(tmp_path))
    both = []
    for name in pair:
        options = {"path": path, "tokenizer": "null:290"} | SOURCES[name]
        if name == "blend":
            options["blend"] = [BlendSource(path=path, weight=1)]
        both.append(options)
    [shown] = run_on_ranks(1, resumed, tmp_path, *both, init=False)
    assert TOLD[pair] in shown


# --- what fails while data is prepared --------------------------------------------------------------------------------


class Failing(NullTokenizer):
    """Text is refused by a full disk."""

    def encode(self, texts: Any) -> Any:
        raise OSError(28, "No space left on device")


def fails(folder: Path, world: int) -> None:
    corpus_data.load_tokenizer = lambda path: Failing(290)  # type: ignore[assignment]
    trainer = make_trainer(Layout(world=world), max_steps=2)
    trainer.fit(GPTModule(config(num_layers=1)), datamodule=data(folder, tokenizer="null:290"))


def told_by_all(folder: Path, kind: str) -> tuple[str, str]:
    module = data(folder, tokenizer="null:290")
    if torch.distributed.get_rank() == 1:
        module._failure = ConfigurationError(["no text"]) if kind == "mistake" else OSError(28, "no space")
    try:
        module._end_together()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_what_fails_where_data_is_prepared_ends_all_ranks_with_its_cause(tmp_path: Path) -> None:
    assert run_on_ranks(2, told_by_all, tmp_path, "slip") == [
        ("RuntimeError", "rank 1 could not prepare the data: OSError: [Errno 28] no space"),
        ("OSError", "[Errno 28] no space"),
    ]
    mistake = ("ConfigurationError", "this configuration cannot run:\n  - no text")
    assert run_on_ranks(2, told_by_all, tmp_path, "mistake") == [mistake, mistake]
    write_numbers(tmp_path)
    with pytest.raises(RankFailed, match="No space left on device"):
        run_on_ranks(2, fails, tmp_path, 2, init=False, timeout=60)


def test_alone_it_is_raised_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        data(tmp_path, path="nowhere").prepare_data()
