"""The data module tells its faults at once, gives each sample once, and goes on where a run was left off."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_megatron import ConfigurationError
from lightning_megatron.lightning_modules import GPTDataModule
from lightning_megatron.lightning_modules.loaders import evaluation_loader, training_loader
from lightning_megatron.trainer.replica import Replica
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


def test_a_loader_goes_on_after_what_it_handed_out_on_any_number_of_replicas() -> None:
    whole = loader(Replica(0, 1))
    wanted = numbers(whole)
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


def test_an_epoch_after_a_resumed_one_is_whole_and_in_another_order() -> None:
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
    whole = loader(Replica(0, 1))
    whole.sampler.set_epoch(1)
    assert numbers(limited) == numbers(whole)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_evaluation_counts_every_sample_once_on_any_number_of_replicas(size: int) -> None:
    counted: list[int] = []
    for rank in range(size):
        batches = evaluation_loader(Numbered(), 10, global_batch_size=4, replica=Replica(rank, size), num_workers=0)
        rows = [(batch["tokens"].flatten(), batch["loss_mask"].flatten()) for batch in batches]
        assert len(rows) == 3
        counted += [int(token) for tokens, mask in rows for token, kept in zip(tokens, mask, strict=True) if kept]
    assert sorted(counted) == list(range(10))


class Reader(L.LightningModule):
    """Notes the tokens of every batch it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch["tokens"].clone())
        return self.weight.sum()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert batch["loss_mask"].any()

    def configure_optimizers(self) -> Any:
        # Asking for this makes the loader before the checkpoint's loops are restored.
        assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)


def read(folder: Path, max_steps: int, ckpt_path: str | None = None, **options: Any) -> list[Tensor]:
    """The tokens of every batch; a checkpoint of each step is left in `folder`."""
    saver = ModelCheckpoint(folder / "saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        PLAIN, max_steps=max_steps, max_epochs=100, enable_checkpointing=True, callbacks=[saver], **options
    )
    module = Reader()
    trainer.fit(module, datamodule=data(folder), ckpt_path=ckpt_path)
    return module.seen


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 3}])
def test_a_resumed_run_sees_what_the_uninterrupted_one_saw(tmp_path: Path, options: dict[str, Any]) -> None:
    options = options or {"limit_train_batches": 7}
    wanted = read(tmp_path, 17, **options)
    assert not any(torch.equal(one, other) for i, one in enumerate(wanted) for other in wanted[:i])
    for step in (1, 3, 6, 7, 9, 14):
        resumed = read(tmp_path, 17, str(tmp_path / "saved" / f"step={step}.ckpt"), **options)
        assert len(resumed) == 17 - step
        assert all(torch.equal(one, other) for one, other in zip(resumed, wanted[step:], strict=True)), step


def test_a_second_fit_starts_from_the_beginning(tmp_path: Path) -> None:
    wanted = read(tmp_path, 2)
    assert all(torch.equal(*pair) for pair in zip(read(tmp_path, 2), wanted, strict=True))


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    module = GPTDataModule(
        vocab_size=100,
        sequence_length=0,
        global_batch_size=-1,
        path=str(tmp_path / "empty"),
        dataset="name",
        validation_fraction=1.5,
    )
    faults = "\n".join(module.faults())
    for told in ("sequence_length (0)", "global_batch_size (-1)", "both given", "no file", "1.5", "vocab_size (100)"):
        assert told in faults
    with pytest.raises(ConfigurationError, match="6 faults"):
        module.setup("fit")


def test_sound_options_have_no_faults(tmp_path: Path) -> None:
    assert data(tmp_path).faults() == []


def test_a_tokenizer_that_outgrows_the_model_is_a_fault(tmp_path: Path) -> None:
    first = data(tmp_path)
    first.setup("fit")
    [tokenizer] = (tmp_path / "cache").glob("tokenizer-*.json")
    assert first.tokenizer is not None
    needed = first.tokenizer.vocab_size
    assert data(tmp_path, tokenizer=str(tokenizer), vocab_size=needed).faults() == []
    [fault] = data(tmp_path, tokenizer=str(tokenizer), vocab_size=needed - 1).faults()
    assert str(needed) in fault
    [fault] = data(tmp_path, tokenizer=str(tmp_path / "none.json")).faults()
    assert "does not exist" in fault


def test_text_that_is_too_short_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="tokens are too few"):
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


def test_with_nothing_held_out_there_is_no_validation(tmp_path: Path) -> None:
    module = data(tmp_path, validation_fraction=0.0)
    module.setup("fit")
    assert module.val_dataloader() == []
