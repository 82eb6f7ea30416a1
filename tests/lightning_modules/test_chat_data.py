"""Conversations through a Trainer: the same batches and losses on every layout, every answer once, faults at once."""

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_megatron import ConfigurationError
from lightning_megatron.data import load_rows
from lightning_megatron.lightning_modules import AdamWConfig, ChatDataConfig, ChatDataModule, GPTModule
from lightning_megatron.models import GPTConfig
from tests.data.chats import HEADERS, write_rows, write_tokenizer
from tests.harness.ranks import run_on_ranks
from tests.lightning_modules.corpus import held_out
from tests.lightning_modules.pretrained import write_chats
from tests.trainer.layouts import PLAIN, QUIET, Layout, make_trainer

pytestmark = pytest.mark.filterwarnings(QUIET)

LAYOUTS = {
    "tp=2 sp": Layout(world=2, tp=2, sp=True),
    "pp=2": Layout(world=2, pp=2, microbatches=2),
    "dp=2": Layout(world=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("chats")
    write_tokenizer(path / "tokenizer", HEADERS)
    write_chats(path / "chats.jsonl", copies=8)
    data(path).setup("fit")  # the text is prepared once, for all layouts
    return path


def data(folder: Path, **options: Any) -> ChatDataModule:
    defaults: dict[str, Any] = {
        "tokenizer": str(folder / "tokenizer"),
        "path": str(folder / "chats.jsonl"),
        "sequence_length": 64,
        "global_batch_size": 4,
        **held_out(options, 0.25),
        "pad_to_multiple": 2,
        "cache_directory": str(folder / "cache"),
    }
    return ChatDataModule(ChatDataConfig(**(defaults | options)))


class Losses(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.lengths: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        self.lengths.append(batch["tokens"].shape[1])


def run(layout: Layout, folder: Path) -> tuple[list[float], float, list[int]]:
    torch.manual_seed(7)
    config = GPTConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=304, position="rotary", hidden_dropout=0.1
    )
    losses = Losses()
    trainer = make_trainer(layout, callbacks=[losses], max_steps=4, max_epochs=-1, val_check_interval=4)
    trainer.fit(GPTModule(config, AdamWConfig(lr=1e-2)), datamodule=data(folder))
    return losses.losses, float(trainer.callback_metrics["val_loss"]), losses.lengths


@functools.cache
def runs(layout: Layout, folder: Path) -> list[Any]:
    return run_on_ranks(layout.world, run, layout, folder, init=False)


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_those_of_one_device(name: str, folder: Path) -> None:
    [(wanted, wanted_val, lengths)] = runs(PLAIN, folder)
    assert wanted[-1] < wanted[0] - 0.05 and len(set(lengths)) > 1, "batches differ in length"
    found = runs(LAYOUTS[name], folder)
    for losses, val_loss, _ in found:
        assert losses == pytest.approx(wanted, abs=1e-9)
        assert val_loss == pytest.approx(wanted_val, abs=1e-6)  # torchmetrics sums in float32
    if name == "dp=2":
        assert found[0][2] != found[1][2], "each replica pads to its own longest"


class Reader(L.LightningModule):
    """Notes what every batch asks to be learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[Tensor] = []
        self.validated: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert torch.equal(batch["labels"] != -100, batch["loss_mask"] == 1)
        self.seen.append(batch["tokens"].clone())
        return self.weight.sum()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        kept = batch["loss_mask"].bool()
        assert (batch["labels"][kept] >= 0).all()
        self.validated += [row[mask] for row, mask in zip(batch["labels"], kept, strict=True) if mask.any()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def read(folder: Path, max_steps: int, ckpt_path: str | None = None, **options: Any) -> Reader:
    # A saver does not write over what another run has left.
    saved = folder / ("packed" if options.get("packing") else "saved")
    saver = ModelCheckpoint(saved, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(PLAIN, max_steps=max_steps, enable_checkpointing=True, callbacks=[saver], max_epochs=9)
    module = Reader()
    trainer.fit(module, datamodule=data(folder, **options), ckpt_path=ckpt_path)
    return module


def test_a_resumed_run_sees_what_the_uninterrupted_one_saw(folder: Path) -> None:
    wanted = read(folder, 7).seen
    resumed = read(folder, 7, str(folder / "saved" / "step=3.ckpt")).seen
    assert len(resumed) == 4
    assert all(torch.equal(one, other) for one, other in zip(resumed, wanted[3:], strict=True))


def test_every_row_that_is_held_out_counts_once(folder: Path) -> None:
    module = read(folder, 4)
    assert len(module.validated) == 6
    none_held_out = data(folder, validation_fraction=0.0)
    none_held_out.setup("fit")
    assert none_held_out.val_dataloader() == []
    rows = [{"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]}] * 5
    module = read(folder, 6, validation_path=str(write_rows(folder / "held_out.jsonl", rows)))
    assert len(module.validated) == 5 and len({tuple(row.tolist()) for row in module.validated}) == 1


def test_what_became_of_the_rows_is_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        data(folder, sequence_length=50).setup("fit")
    shown = [record.message for record in caplog.records]
    assert any(line.startswith("training: ") and "were cut" in line for line in shown)
    assert any(line.startswith("validation: ") for line in shown)


def test_packed_chats_are_the_same_answers_in_fewer_rows(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def answers(batches: Any) -> list[list[int]]:
        found = []
        for row in (row for batch in batches for row in zip(batch["labels"], batch["segments"], strict=True)):
            found += [row[0][(row[1] == i) & (row[0] != -100)].tolist() for i in range(int(row[1].max()) + 1)]
        return sorted(found)

    def loaded(**options: Any) -> list[dict[str, Tensor]]:
        class Keeper(L.LightningModule):
            def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
                kept.append({"segments": torch.zeros_like(batch["tokens"]), **batch})

        kept: list[dict[str, Tensor]] = []
        module = data(folder, global_batch_size=1, **options)
        make_trainer(PLAIN).validate(Keeper(), datamodule=module, verbose=False)
        return kept

    plain, packed = loaded(), loaded(packing="documents", sequence_length=127, pad_to_multiple=8)
    assert answers(plain) == answers(packed) and len(packed) < len(plain)
    assert {tuple(value.shape) for batch in packed for value in batch.values()} == {(1, 128)}
    assert all(batch["segments"][0, 127] == -1 and batch["segments"].max() > 0 for batch in packed)
    with caplog.at_level("INFO"):
        data(folder, packing="documents").setup("fit")
    assert any(record.message.startswith("training: ") and "rows of 64" in record.message for record in caplog.records)


def test_a_resumed_run_over_packed_chats_sees_what_the_uninterrupted_one_saw(folder: Path) -> None:
    wanted = read(folder, 5, packing="documents", global_batch_size=2).seen
    resumed = read(folder, 5, str(folder / "packed" / "step=3.ckpt"), packing="documents", global_batch_size=2).seen
    assert len(resumed) == 2
    assert all(torch.equal(one, other) for one, other in zip(resumed, wanted[3:], strict=True))


def prompts(folder: Path, **options: Any) -> list[str]:
    class Teller(L.LightningModule):
        def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> list[Tensor]:
            return [row[:length] for row, length in zip(batch["tokens"], batch["lengths"].tolist(), strict=True)]

    module = data(folder, prompts=["Hi.", "é"], **options)
    predicted = make_trainer(PLAIN).predict(Teller(), datamodule=module)
    assert predicted is not None and module.tokenizer is not None
    return [module.tokenizer.decode(row.tolist()) for rows in predicted for row in rows]


def test_a_prompt_is_a_users_message_where_there_is_a_template(folder: Path) -> None:
    # No table is needed to answer.
    asked = prompts(folder, path=None)
    assert asked == [f"<|begin|>user\n\n{text}<|end|>\n<|begin|>assistant\n\n" for text in ("Hi.", "é")]
    write_tokenizer(folder / "bare", None)
    assert prompts(folder, tokenizer=str(folder / "bare"), path=None) == ["Hi.", "é"]


def test_all_faults_are_reported_at_once(folder: Path) -> None:
    module = data(
        folder,
        tokenizer="none",
        path="nowhere.jsonl",
        validation_path="neither.jsonl",
        sequence_length=0,
        global_batch_size=0,
        pad_to_multiple=0,
    )
    faults = module.faults()
    assert len(faults) == 6
    for shown in ("sequence_length (0)", "global_batch_size (0)", "nowhere.jsonl", "'none'", "pad_to_multiple (0)"):
        assert any(shown in fault for fault in faults), shown
    assert sum(fault.startswith("validation_path: path ('neither.jsonl') does not exist") for fault in faults) == 1
    assert data(folder).faults() == []


@pytest.mark.parametrize(
    ("rows", "template", "shown"),
    [
        ([{"question": "x", "answer": "y"}], HEADERS, "needs 'messages'"),
        ([{"messages": [{"role": "user", "content": "x"}]}], HEADERS, "anything to learn"),
        ([{"messages": [{"role": "user", "content": "x"}]}], None, "no chat template"),
        ([{"prompt": "x", "completion": None}, {"prompt": "x", "completion": "y"}], HEADERS, "must be text"),
    ],
)
def test_rows_that_cannot_be_learnt_from_are_a_fault(tmp_path: Path, rows: Any, template: Any, shown: str) -> None:
    write_tokenizer(tmp_path / "tokenizer", template)
    write_rows(tmp_path / "chats.jsonl", rows)
    with pytest.raises(ConfigurationError, match=shown):
        data(tmp_path, validation_fraction=0.0).setup("fit")


def test_without_a_source_there_is_nothing_to_train_on(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="one of them must be given"):
        data(folder, path=None).setup("fit")


def test_rows_for_validation_are_cached_with_the_others_also_of_a_named_data_set(folder: Path, tmp_path: Path) -> None:
    table = load_rows(path=folder / "chats.jsonl", cache_dir=tmp_path / "own")
    table.save_to_disk(str(tmp_path / "saved"))
    rows = [{"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]}] * 5
    held = str(write_rows(tmp_path / "held_out.jsonl", rows))
    options = {"path": None, "dataset": str(tmp_path / "saved"), "validation_path": held}
    module = data(folder, **options, cache_directory=str(tmp_path / "cache"))
    module.setup("fit")
    assert module._training is not None and module._held_out is not None
    assert (module._training.count, module._held_out.count) == (len(table), 5)
    assert list((tmp_path / "cache" / "documents").rglob("*.arrow")), "not in the cache of all users"


def test_a_split_of_files_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"split \('test'\) chooses a part of a dataset, but path"):
        data(folder, split="test").setup("fit")
