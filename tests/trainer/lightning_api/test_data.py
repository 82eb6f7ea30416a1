"""Loaders of every kind that a Trainer takes give every rank the batches that one device gets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset

from tests.harness.sample import diagonal
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.lightning_api.test_ledger import LAYOUTS, Case, Ledger, Record, discrepancies, record
from tests.trainer.modules import Small, samples

ROWS = samples(24)


class Stream(IterableDataset[Any]):
    """Rows one after the other; every dp rank reads all of them, cut by nothing but its position."""

    def __init__(self, first: int = 0, step: int = 1) -> None:
        self.first, self.step = first, step

    def __iter__(self) -> Iterator[Any]:
        return (ROWS[i] for i in range(self.first, len(ROWS), self.step))


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(range(self.first, len(ROWS), self.step))


class Batches(IterableDataset[Any]):
    """Whole batches of sizes that two microbatches do not divide."""

    def __iter__(self) -> Iterator[Any]:
        for first, last in ((0, 5), (5, 8), (8, 9), (9, 16)):
            yield ROWS[first:last]


class Sees(Small):
    """Writes down which rows it got, and takes batches out of trees; logs under the loader's number."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(fingerprint(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            # Of several loaders one may have ended before the others.
            batch = next(entry for entry in batch.values() if entry is not None)
        return super().training_step(batch, batch_idx)  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = functional.cross_entropy(self.logits(batch[0]), batch[1])
        self.log("val_loss", loss)
        self.log(f"val_loss_of_{dataloader_idx}", loss, add_dataloader_idx=False)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", functional.cross_entropy(self.logits(batch[0]), batch[1]), on_step=True, on_epoch=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.logits(batch[0]) + dataloader_idx


class SeesOne(Sees):
    """For a single loader: a step without `dataloader_idx`."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        super().validation_step(batch, batch_idx)


def fingerprint(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: fingerprint(entry) for name, entry in batch.items()}
    return None if batch is None else float(batch[0].sum())


def plain_loader(rows: int = 24, batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(Subset(ROWS, range(rows)), batch_size=batch_size, **options)


def loop(layout: Layout, train: Any, val: Any = None, module: Sees | None = None, **options: Any) -> Record:
    ledger = Ledger()
    module = module if module is not None else SeesOne()
    trainer = make_trainer(layout, callbacks=[ledger], **options)
    trainer.fit(module, train, val)
    return record(trainer, ledger, seen=module.seen)


def several(layout: Layout, _: Path) -> Record:
    """Several loaders in every loop but the training."""
    ledger = Ledger()
    module = Sees()
    trainer = make_trainer(layout, callbacks=[ledger], max_epochs=1, num_sanity_val_steps=1)
    loaders = [plain_loader(16), plain_loader(24, 4)]
    trainer.fit(module, plain_loader(), loaders)
    found = {
        "validated": trainer.validate(module, loaders, verbose=False),
        "tested": trainer.test(module, loaders, verbose=False),
        "predicted": trainer.predict(module, loaders),
    }
    limited = make_trainer(layout, limit_val_batches=1, limit_predict_batches=0.5)
    found["limited"] = limited.validate(module, loaders, verbose=False)
    found["half"] = limited.predict(module, loaders)
    return record(trainer, ledger, **found)


def combined(layout: Layout, mode: Any) -> Record:
    loaders = {"a": plain_loader(24), "b": plain_loader(16)}
    return loop(layout, CombinedLoader(loaders, mode))


def sequential(layout: Layout, _: Path) -> Record:
    loaders = CombinedLoader([plain_loader(16), plain_loader(8, 4)], "sequential")
    return loop(layout, plain_loader(), loaders, module=Sees(), max_epochs=1)


def shuffled(layout: Layout, _: Path) -> Record:
    """A single dp rank's loader is the user's: it shuffles as on one device under the same seed."""
    L.seed_everything(3, verbose=False)
    return loop(layout, plain_loader(shuffle=True), plain_loader(8))


def workers(layout: Layout, _: Path) -> Record:
    return loop(layout, plain_loader(num_workers=1, shuffle=False), max_epochs=1)


def own_batches(layout: Layout, _: Path) -> Record:
    sampler = BatchSampler(SequentialSampler(range(24)), batch_size=5, drop_last=False)
    return loop(layout, DataLoader(ROWS, batch_sampler=sampler), max_epochs=1)


class OwnLoaders(SeesOne):
    """A module with loaders of its own."""

    def train_dataloader(self) -> Any:
        return plain_loader()

    def val_dataloader(self) -> Any:
        return plain_loader(16)

    def predict_dataloader(self) -> Any:
        return plain_loader(8)


def of_the_module(layout: Layout, _: Path) -> Record:
    ledger, module = Ledger(), OwnLoaders()
    trainer = make_trainer(layout, callbacks=[ledger], max_epochs=1)
    trainer.fit(module)
    return record(trainer, ledger, seen=module.seen, predicted=trainer.predict(module))


CASES: dict[str, Case] = {
    "a stream of known length": lambda layout, _: loop(layout, DataLoader(SizedStream(), batch_size=8), plain_loader()),
    "a stream": lambda layout, _: loop(layout, DataLoader(Stream(), batch_size=8), DataLoader(Stream(), batch_size=8)),
    "a stream with limits": lambda layout, _: loop(
        layout,
        DataLoader(Stream(), batch_size=4),
        DataLoader(Stream(), batch_size=8),
        limit_train_batches=5,
        limit_val_batches=1,
        val_check_interval=2,
    ),
    "a stream of uneven batches": lambda layout, _: loop(layout, DataLoader(Batches(), batch_size=None)),
    "accumulation over a stream": lambda layout, _: loop(
        layout, DataLoader(Stream(), batch_size=4), accumulate_grad_batches=4
    ),
    "several loaders": several,
    "combined, max_size_cycle": lambda layout, _: combined(layout, "max_size_cycle"),
    "combined, max_size": lambda layout, _: combined(layout, "max_size"),
    "combined, min_size": lambda layout, _: combined(layout, "min_size"),
    "a dict of loaders": lambda layout, _: loop(layout, {"a": plain_loader(), "b": plain_loader(16)}),
    "one after the other": sequential,
    "shuffled": shuffled,
    "a loader with a worker": workers,
    "batches of the user's own": own_batches,
    "loaders of the module": of_the_module,
}
CELLS = diagonal([(layout, case) for layout in ("one", "pp2") for case in CASES])


@pytest.mark.matrix
@pytest.mark.parametrize(("layout", "case"), CELLS)
def test_every_rank_of_a_model_replica_gets_the_batches_of_one_device(layout: str, case: str) -> None:
    names = [name for chosen, name in CELLS if chosen == layout]
    assert discrepancies(__name__, names, LAYOUTS[layout], case, list(CASES)) == []


def test_a_loader_that_is_set_up_by_hand_outside_of_a_run_stays_as_it_is() -> None:
    module, loader = Small(), DataLoader(ROWS)
    trainer = make_trainer(Layout())
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, val_dataloaders=loader)
    trainer.validate_loop.setup_data()
    assert trainer.val_dataloaders is loader


@pytest.mark.parametrize("what", ["fit", "validate"])
def test_the_batch_size_finder_finds_one_for_training_and_for_evaluation(what: Any, tmp_path: Path) -> None:
    class Sized(Small):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return DataLoader(ROWS, batch_size=self.batch_size)

        val_dataloader = train_dataloader

    module = Sized()
    trainer = make_trainer(Layout(), default_root_dir=tmp_path)
    assert Tuner(trainer).scale_batch_size(module, method=what, max_trials=2, steps_per_trial=1) == module.batch_size
    assert module.batch_size > 2
