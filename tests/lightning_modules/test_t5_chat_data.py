"""A T5 learns answers: the same on every layout and after a resumption, from scratch or from a folder."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import ConfigurationError, hf
from lightning_megatron.data import train_tokenizer
from lightning_megatron.lightning_modules import (
    AdamWConfig,
    GenerationConfig,
    T5ChatDataConfig,
    T5ChatDataModule,
    T5FinetuneModule,
    T5Module,
)
from lightning_megatron.lightning_modules.export import ExportPretrained
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import T5Config, T5Model
from tests.data.chats import write_rows, write_tokenizer
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.lightning_modules.corpus import held_out
from tests.lightning_modules.losses import Losses
from tests.lightning_modules.pretrained import ANSWERS, write_model
from tests.trainer.layouts import PLAIN, QUIET, Layout, make_trainer, share_of

pytestmark = pytest.mark.filterwarnings(QUIET)

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_sequence_length": 64,
    "max_decoder_sequence_length": 32,
    "relative_buckets": 8,
    "relative_max_distance": 20,
}
# And how samples lie in rows.
LAYOUTS = {
    "tp=2 sp": (Layout(world=2, tp=2, sp=True), "none"),
    "pp=2": (Layout(world=2, pp=2, microbatches=2), "documents"),
    "cp=2": (Layout(world=2, cp=2), "documents"),
    "dp=2": (Layout(world=2), "none"),
}
# Above sequence_length, which relative positions allow.
LONG = "long " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("t5 chats")
    texts = [*ANSWERS, *ANSWERS.values()] * 9
    train_tokenizer(texts, 300, path / "tokenizer" / "tokenizer.json", ("<pad>",))
    write_rows(path / "rows.jsonl", [{"prompt": asked, "completion": shown} for asked, shown in ANSWERS.items()] * 12)
    data(path).setup("fit")
    return path


def data(folder: Path, **options: Any) -> T5ChatDataModule:
    defaults: dict[str, Any] = {
        "tokenizer": str(folder / "tokenizer"),
        "sequence_length": 32,
        "decoder_sequence_length": 16,
        "global_batch_size": 4,
        "path": str(folder / "rows.jsonl"),
        "pad_to_multiple": 4,
        "prompts": list(ANSWERS),
        "cache_directory": str(folder / "cache"),
        **held_out(options, 0.1),
    }
    return T5ChatDataModule(T5ChatDataConfig(**(defaults | options)))


def t5() -> T5Module:
    return T5Module(
        T5Config(**SIZES, hidden_dropout=0.1),
        AdamWConfig(lr=1e-2, warmup_steps=1),
        GenerationConfig(max_new_tokens=16, temperature=0.0),
    )


def run(
    layout: Layout, folder: Path, packing: str, steps: int = 3, ckpt_path: str | None = None, saves: bool = False
) -> dict[str, Any]:
    torch.manual_seed(7)
    module, losses, text = t5(), Losses(), data(folder, packing=packing, prompts=[*ANSWERS, LONG])
    saver = ModelCheckpoint(folder / "saved", filename="{step}", every_n_train_steps=30, save_top_k=-1)
    callbacks = [losses, *([saver] if saves else [])]
    trainer = make_trainer(layout, callbacks=callbacks, max_steps=steps, max_epochs=-1, enable_checkpointing=saves)
    trainer.fit(module, datamodule=text, ckpt_path=ckpt_path)
    metrics = trainer.validate(module, datamodule=text, verbose=False)[0]
    predicted = trainer.predict(module, datamodule=text)
    assert predicted is not None and text.tokenizer is not None
    answers = [text.tokenizer.decode(row.tolist()) for batch in predicted for row in batch]
    return {"losses": losses.losses, "metrics": metrics, "answers": answers}


@functools.cache
def on_one_device(folder: Path, packing: str) -> dict[str, Any]:
    return run(PLAIN, folder, packing)


@pytest.mark.parametrize("name", every_nth(LAYOUTS, 2))
def test_losses_metrics_and_answers_are_those_of_one_device(name: str, folder: Path) -> None:
    layout, packing = LAYOUTS[name]
    wanted = on_one_device(folder, packing)
    assert wanted["losses"][-1] < wanted["losses"][0] - 0.05, "it learns, so a step that is left out would show"
    for rank, found in enumerate(run_on_ranks(layout.world, run, layout, folder, packing, init=False)):
        assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-9)
        assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-9)
        assert found["answers"] == share_of(wanted["answers"], layout, rank) != []


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_a_loss_is_that_of_each_sample_alone_without_padding(packing: Any, folder: Path) -> None:
    module, text = t5().double(), data(folder, packing=packing, sequence_length=64, decoder_sequence_length=48)
    text.setup("fit")
    torch.manual_seed(7)
    model = T5Model(T5Config(**SIZES), mesh=Mesh.single()).double().eval()
    assert text._training is not None
    rows = [text._training.dataset[i] for i in range(4)]
    samples = [one for row in rows for one in samples_in(row)]
    assert len(samples) == 4 if packing == "none" else len(samples) > 4, "a row holds several"
    assert len({len(one["labels"]) for one in samples}) > 1 and len({len(one["encoder_tokens"]) for one in samples}) > 1
    batch = text._collate(rows)
    assert {value.shape[1] % 4 for value in batch.values()} == {0}
    module.model = model
    total = sum(
        model(one["encoder_tokens"][None], one["decoder_tokens"][None], labels=one["labels"][None]).item()
        * len(one["labels"])
        for one in samples
    )
    mean = total / sum(len(one["labels"]) for one in samples)
    assert module._loss(batch).item() == pytest.approx(mean, rel=1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
def test_it_learns_to_answer_and_a_resumed_run_learns_the_same(folder: Path) -> None:
    [full] = run_on_ranks(1, run, Layout(), folder, "none", 90, None, True, init=False)
    assert full["answers"][:-1] == [f"{answer}<|endoftext|>" for answer in ANSWERS.values()]
    path = str(folder / "saved" / "step=60.ckpt")
    [resumed] = run_on_ranks(1, run, Layout(), folder, "none", 90, path, init=False)
    assert resumed["losses"] == pytest.approx(full["losses"][60:], abs=1e-12)
    assert resumed["metrics"] == pytest.approx(full["metrics"], rel=1e-12)


def test_a_folder_is_trained_further(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    hf.save_pretrained(T5Model(T5Config(**SIZES), mesh=Mesh.single()), tmp_path / "t5")
    module = T5FinetuneModule(str(tmp_path / "t5"), AdamWConfig(lr=1e-2, warmup_steps=1))
    export = ExportPretrained(str(tmp_path / "tuned"))
    trainer = make_trainer(PLAIN, max_steps=2, max_epochs=-1, precision="32-true", callbacks=[export])
    trainer.fit(module, datamodule=data(folder))
    assert module.model is not None
    before = dict(hf.from_pretrained(tmp_path / "t5").named_parameters())
    change = max((value - before[name]).abs().max().item() for name, value in module.model.named_parameters())
    assert 1e-3 < change < 0.1, "from the folder's weights, a little"
    tuned = dict(hf.from_pretrained(tmp_path / "tuned").named_parameters())
    assert all(torch.equal(tuned[name], value) for name, value in module.model.named_parameters())
    with pytest.raises(ValueError, match=r"has a GPTConfig; FinetuneModule trains"):
        T5FinetuneModule(str(write_model(tmp_path / "llama")))


def samples_in(row: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """What a row holds, each by itself."""
    read, shown = row["encoder_segments"], row["decoder_segments"]
    return [
        {name: value[(read if name.startswith("encoder") else shown) == i] for name, value in row.items()}
        for i in range(int(read.max()) + 1)
    ]


def test_all_faults_are_reported_at_once(folder: Path, tmp_path: Path) -> None:
    wrong: dict[str, Any] = {"packing": "rows", "path": "nowhere", "pad_to_multiple": 0}
    faults = "\n".join(data(folder, decoder_sequence_length=0, **wrong).faults())
    for shown in ("decoder_sequence_length (0)", "'nowhere'", "pad_to_multiple (0)", "packing ('rows')"):
        assert shown in faults
    write_tokenizer(tmp_path / "bare", None)
    [fault] = data(folder, tokenizer=str(tmp_path / "bare")).faults()
    assert "no token for padding" in fault


def test_a_prompt_without_room_is_reported_before_prediction_where_positions_are_learned(folder: Path) -> None:
    for position in ("learned", "relative"):
        module = T5Module(T5Config(**SIZES | {"position": position}), generation=GenerationConfig(max_new_tokens=2))
        text = data(folder, prompts=["short", LONG])
        trainer = make_trainer(PLAIN)
        if position == "learned":
            wanted = r"prompt \('long .*and max_sequence_length \(64\) of the model is the most"
            with pytest.raises(ConfigurationError, match=wanted):
                trainer.predict(module, datamodule=text)
        else:
            # What is far is alike, however far.
            predicted = trainer.predict(module, datamodule=text)
            assert predicted is not None and [len(row) for row in predicted[0]] == [2, 2]
