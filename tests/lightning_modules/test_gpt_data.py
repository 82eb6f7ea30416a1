"""The data module reports its faults at once, gives each sample once, and goes on where a run was left off."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_megatron import ConfigurationError
from lightning_megatron.lightning_modules import GPTDataConfig, GPTDataModule
from lightning_megatron.lightning_modules.loaders import evaluation_loader, training_loader
from lightning_megatron.trainer.setup.replica import Replica
from tests.lightning_modules.corpus import VOCABULARY, data, write_corpus
from tests.trainer.layouts import PLAIN, make_trainer


class Numbered(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sample i holds i."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": torch.tensor([index]), "loss_mask": torch.ones(1)}


def loader(replica: Replica, num_samples: int = 22) -> Any:
    return training_loader(Numbered(), num_samples, global_batch_size=4, replica=replica, seed=1, num_workers=0)


def numbers(batches: Any) -> list[list[int]]:
    return [batch["tokens"].flatten().tolist() for batch in batches]


def first_of(batches: Any, count: int) -> list[list[int]]:
    found = []
    for batch in batches:
        found.append(batch)
        if len(found) == count:
            break
    return numbers(found)


def test_a_loader_goes_on_after_what_it_handed_out_on_any_number_of_dp_ranks() -> None:
    full = loader(Replica(0, 1))
    wanted = numbers(full)
    assert len(wanted) == 5
    begun = loader(Replica(0, 1))
    assert first_of(begun, 2) == wanted[:2]
    state = begun.state_dict()
    parts = []
    for rank in range(2):
        resumed = loader(Replica(rank, 2))
        resumed.load_state_dict(state)
        parts.append(numbers(resumed))
    assert [left + right for left, right in zip(*parts, strict=True)] == wanted[2:]


def test_an_epoch_after_a_resumed_one_is_complete_and_in_another_order() -> None:
    resumed = loader(Replica(0, 1))
    resumed.load_state_dict({"consumed_samples": 12})
    assert len(numbers(resumed)) == 2
    resumed.sampler.set_epoch(1)
    second = numbers(resumed)
    assert len(second) == 5 and second != numbers(loader(Replica(0, 1)))
    assert resumed.state_dict() == {"consumed_samples": 40}


def test_an_epoch_that_ended_early_does_not_shift_the_next_one() -> None:
    limited = loader(Replica(0, 1))
    first_of(limited, 3)
    limited.sampler.set_epoch(1)
    full = loader(Replica(0, 1))
    full.sampler.set_epoch(1)
    assert numbers(limited) == numbers(full)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_evaluation_counts_every_sample_once_on_any_number_of_dp_ranks(size: int) -> None:
    counted: list[int] = []
    for rank in range(size):
        batches = evaluation_loader(Numbered(), 10, global_batch_size=4, replica=Replica(rank, size), num_workers=0)
        rows = [(batch["tokens"].flatten(), batch["loss_mask"].flatten()) for batch in batches]
        assert len(rows) == 3
        counted += [int(token) for tokens, mask in rows for token, kept in zip(tokens, mask, strict=True) if kept]
    assert sorted(counted) == list(range(10))


def test_an_evaluation_that_was_cut_short_restarts() -> None:
    batches = evaluation_loader(Numbered(), 10, global_batch_size=4, replica=Replica(0, 1), num_workers=0)
    assert first_of(batches, 1) == first_of(batches, 1) == [[0, 1, 2, 3]]
    assert len(numbers(batches)) == 3


class Reader(L.LightningModule):
    """Notes the tokens of every batch it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[Tensor] = []
        self.segments: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch["tokens"].clone())
        if "segments" in batch:
            self.segments.append(batch["segments"].clone())
        return self.weight.sum()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert batch["loss_mask"].any()

    def configure_optimizers(self) -> Any:
        # Asking for this makes the loader before the checkpoint's loops are restored.
        assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)


def read(
    folder: Path, max_steps: int, ckpt_path: str | None = None, packing: str = "stream", **options: Any
) -> list[Tensor]:
    """The tokens of every batch; a checkpoint of each step is left in `folder`."""
    saver = ModelCheckpoint(folder / "saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        PLAIN, max_steps=max_steps, max_epochs=100, enable_checkpointing=True, callbacks=[saver], **options
    )
    module = Reader()
    trainer.fit(module, datamodule=data(folder, packing=packing), ckpt_path=ckpt_path)
    assert len(module.segments) == (len(module.seen) if packing == "documents" else 0)
    return module.seen


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 3}, {"packing": "documents"}])
def test_a_resumed_run_sees_what_the_uninterrupted_one_saw(tmp_path: Path, options: dict[str, Any]) -> None:
    options = {"limit_train_batches": 7} | options
    wanted = read(tmp_path, 17, **options)
    assert not any(torch.equal(one, other) for i, one in enumerate(wanted) for other in wanted[:i])
    for step in (1, 3, 6, 7, 9, 14):
        resumed = read(tmp_path, 17, str(tmp_path / "saved" / f"step={step}.ckpt"), **options)
        assert len(resumed) == 17 - step
        assert all(torch.equal(one, other) for one, other in zip(resumed, wanted[step:], strict=True)), step


def test_a_second_fit_starts_from_the_beginning(tmp_path: Path) -> None:
    wanted = read(tmp_path, 2)
    assert all(torch.equal(*pair) for pair in zip(read(tmp_path, 2), wanted, strict=True))


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    module = GPTDataModule(
        GPTDataConfig(
            vocab_size=100,
            sequence_length=0,
            global_batch_size=-1,
            path=str(tmp_path / "empty"),
            dataset="name",
            validation_fraction=1.5,
            packing="rows",  # type: ignore[arg-type]
            long_documents="cut",  # type: ignore[arg-type]
        )
    )
    faults = "\n".join(module.faults())
    for shown in ("sequence_length (0)", "global_batch_size (-1)", "both given", "no file", "1.5", "vocab_size (100)"):
        assert shown in faults
    assert "packing ('rows') must be one of 'stream', 'documents'" in faults
    assert "long_documents ('cut') must be one of 'split', 'drop', 'refuse'" in faults
    with pytest.raises(ConfigurationError, match="8 faults"):
        module.setup("fit")


def test_sound_options_have_no_faults(tmp_path: Path) -> None:
    assert data(tmp_path).faults() == []


def test_a_tokenizer_that_outgrows_the_model_is_a_fault(tmp_path: Path) -> None:
    first = data(tmp_path)
    first.setup("fit")
    [tokenizer] = (tmp_path / "cache").glob("tokenizer-*.json")
    assert first.tokenizer is not None and first.trained_tokenizer == tokenizer
    needed = first.tokenizer.vocab_size
    assert data(tmp_path, tokenizer=str(tokenizer), vocab_size=needed).faults() == []
    [fault] = data(tmp_path, tokenizer=str(tokenizer), vocab_size=needed - 1).faults()
    assert str(needed) in fault
    [fault] = data(tmp_path, tokenizer=str(tmp_path / "none.json")).faults()
    assert "does not exist" in fault


def test_text_that_is_too_short_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="too few for one sample"):
        data(tmp_path, sequence_length=100_000).setup("fit")


def test_of_one_document_the_last_samples_are_held_out(tmp_path: Path) -> None:
    path = write_corpus(tmp_path, num_documents=1, num_words=800)
    module = data(tmp_path, path=str(path))
    module.setup("fit")
    assert module._training is not None and module._held_out is not None
    assert module._held_out.count == round(0.2 * (module._training.count + module._held_out.count))
    last = module._training.dataset[module._training.count - 1]["labels"][-1]
    assert last == module._held_out.dataset[0]["tokens"][0]
    assert module._training.dataset[0]["tokens"].max() < VOCABULARY


# --- documents --------------------------------------------------------------------------------------------------------


def documents_of(samples: Any, end_of_text: int) -> list[list[int]]:
    """The documents of which a data set's segments are the pieces, each a piece and its last label."""
    found = []
    for i in range(samples.count):
        row = samples.dataset[i]
        for number in range(int(row["segments"].max()) + 1):
            part = row["segments"] == number
            found.append([*row["tokens"][part].tolist(), int(row["labels"][part][-1])])
            assert end_of_text not in row["tokens"][part]
    return found


def test_packed_rows_hold_the_documents_to_train_on_and_not_those_held_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = data(tmp_path, packing="documents", sequence_length=1024)
    with caplog.at_level("INFO"):
        module.setup("fit")
    assert module._training is not None and module._held_out is not None and module.tokenizer is not None
    found = [documents_of(samples, module.tokenizer.end_of_text) for samples in (module._training, module._held_out)]
    assert [len(documents) for documents in found] == [10, 2]
    texts = sorted(module.tokenizer.decode(document[:-1]) for part in found for document in part)
    assert texts == sorted(path.read_text() for path in (tmp_path / "corpus").iterdir())
    shown = [record.message for record in caplog.records]
    assert any(line.startswith("training: 10 documents in ") and "% full" in line for line in shown)
    assert any(line.startswith("validation: 2 documents in ") for line in shown)


def test_long_documents_are_split_dropped_or_a_fault(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "corpus" / "short.txt").write_text("the cat")
    counts = {}
    for choice in ("split", "drop"):
        module = data(tmp_path, packing="documents", long_documents=choice, global_batch_size=1, validation_fraction=0)
        module.setup("fit")
        assert module._training is not None
        counts[choice] = module._training.count
    assert counts["drop"] == 1 < 12 < counts["split"]
    with pytest.raises(ConfigurationError, match=r"12 of 13 documents are longer than sequence_length \(16\)"):
        data(tmp_path, packing="documents", long_documents="refuse", validation_fraction=0).setup("fit")
    data(tmp_path, long_documents="refuse").setup("fit")  # in a stream no document is too long


def test_of_one_document_the_last_rows_are_held_out(tmp_path: Path) -> None:
    path = write_corpus(tmp_path, num_documents=1, num_words=800)
    module = data(tmp_path, path=str(path), packing="documents")
    module.setup("fit")
    assert module._training is not None and module._held_out is not None and module.tokenizer is not None
    found = [documents_of(samples, module.tokenizer.end_of_text) for samples in (module._training, module._held_out)]
    [text] = [file.read_text() for file in path.iterdir()]
    assert sum(len(piece) - 1 for part in found for piece in part) == len(module.tokenizer.encode([text])[0])
    assert module._held_out.count == round(0.2 * (module._training.count + module._held_out.count))


def test_with_nothing_held_out_there_is_no_validation(tmp_path: Path) -> None:
    module = data(tmp_path, validation_fraction=0.0)
    module.setup("fit")
    assert module.val_dataloader() == []
