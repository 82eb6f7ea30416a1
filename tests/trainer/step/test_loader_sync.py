"""Data-parallel ranks with unequally many batches end at once, and say how many each has."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_megatron.trainer.step.loader_sync import disagreement
from tests.harness.ranks import RankFailed, run_on_ranks
from tests.trainer.layouts import Layout, make_trainer, replica_of
from tests.trainer.modules import Small, samples

ROWS = samples(24)
DP2 = Layout(world=2)


class Stream(IterableDataset[Any]):
    """So many rows, of which nobody knows the number."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __iter__(self) -> Iterator[Any]:
        return (ROWS[i] for i in range(self.num_rows))


class SizedStream(Stream):
    """The same, which says how many, as it believes."""

    def __len__(self) -> int:
        return 24


class Custom:
    """A loader that is no DataLoader, and does not know its length."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def loader_of(kind: str, num_rows: int) -> Any:
    if kind == "dataset":
        return DataLoader(Subset(ROWS, range(num_rows)), 4)
    stream: Any = {"stream": Stream, "sized stream": SizedStream, "custom": Stream}[kind]
    loader = DataLoader(stream(num_rows), 4)
    return Custom(loader) if kind == "custom" else loader


class Uneven(Small):
    """Gives the second data-parallel rank a batch more to train on, or to evaluate."""

    def __init__(self, kind: str, more: str) -> None:
        super().__init__()
        self.kind, self.more = kind, more

    def _loader(self, what: str) -> Any:
        rank, _ = replica_of(self.trainer)
        # A stream that says more than it has would keep Lightning from validating.
        return loader_of(self.kind, 8 + 4 * rank) if what == self.more else loader_of("dataset", 8)

    def train_dataloader(self) -> Any:
        return self._loader("training")

    def val_dataloader(self) -> Any:
        return self._loader("validation")

    def test_dataloader(self) -> Any:
        return self._loader("test")


def ended(kinds: list[str], more: str) -> list[tuple[str, float]]:
    found = []
    for kind in kinds:
        trainer, began = make_trainer(DP2, max_epochs=2), time.monotonic()
        try:
            getattr(trainer, "test" if more == "test" else "fit")(Uneven(kind, more))
            shown = "done"
        except Exception as error:
            shown = f"{type(error).__name__}: {error}"
        found.append((shown, time.monotonic() - began))
    return found


ANY = ["dataset", "stream", "sized stream", "custom"]


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning")
@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.parametrize("more", ["training", "validation", "test"])
def test_ranks_with_unequally_many_batches_end_with_the_cause(more: str) -> None:
    for told in run_on_ranks(2, ended, ANY, more, init=False):
        for kind, (shown, seconds) in zip(ANY, told, strict=True):
            assert seconds < 30, kind
            if kind == "dataset":
                limit = {"training": "train", "validation": "val"}.get(more, more)
                assert "(rank 0: 2; rank 1: 3), and would wait" in shown and f"limit_{limit}_batches=2" in shown
            else:
                words = ("1 of 2 data-parallel ranks have a batch number 3", "[0] of dp x cp have no more")
                assert any(word in shown for word in words) and "batches" in shown, (kind, shown)


class Even(Small):
    """Has loaders of one kind, of two batches on all ranks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> Any:
        return loader_of(self.kind, 8)

    def val_dataloader(self) -> Any:
        return loader_of(self.kind, 8)


def steps_of(kinds: list[str]) -> list[int]:
    found = []
    for kind in kinds:
        trainer = make_trainer(DP2)
        trainer.fit(Even(kind))
        found.append(trainer.global_step)
    return found


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning")
def test_ranks_with_equally_many_batches_train_whatever_the_loader() -> None:
    assert run_on_ranks(2, steps_of, ANY, init=False) == [[4] * len(ANY)] * 2


class Takes(Small):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return functional.cross_entropy(self.logits(batch[0]), batch[1])

    def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        next(dataloader_iter)


def taken(layout: Layout, step: str) -> str:
    trainer = make_trainer(layout, max_epochs=1)
    try:
        getattr(trainer, step)(Takes(), *[loader_of("dataset", 8)] * (2 if step == "fit" else 1))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument", "ignore:You are using the `dataloader_iter`")
def test_steps_that_take_their_batches_themselves_are_refused_before_they_run() -> None:
    assert run_on_ranks(1, taken, Layout(), "fit", init=False) == ["done"]
    for layout in (Layout(world=2, tp=2), DP2):
        for shown in run_on_ranks(2, taken, layout, "fit", init=False):
            assert shown.startswith("ConfigurationError")
            assert "training_step(self, dataloader_iter) of Takes" in shown and "validation_step(self, d" in shown
    [shown, _] = run_on_ranks(2, taken, Layout(world=2, tp=2), "validate", init=False)
    assert "use validation_step(self, batch, batch_idx)" in shown and "training_step" not in shown


def fitted_without(name: str) -> int:
    module = Small()
    setattr(module, name, None)
    trainer = make_trainer(DP2, max_epochs=1)
    trainer.fit(module, loader_of("dataset", 8))
    return trainer.global_step


@pytest.mark.parametrize(("name", "num_steps"), [("validation_step", [2, 2]), ("training_step", None)])
def test_a_step_may_be_none(name: str, num_steps: list[int] | None) -> None:
    if num_steps is not None:
        assert run_on_ranks(2, fitted_without, name, init=False) == num_steps
        return
    with pytest.raises(RankFailed, match="No `training_step"):
        run_on_ranks(2, fitted_without, name, init=False)


def test_whereabouts_that_differ_are_named() -> None:
    here = {"stage": "train", "epoch": 0, "batch": 3, "is_last": False, "order": 7}
    assert disagreement([here, dict(here)]) == ""
    assert "[1] of dp x cp have no more training batches" in disagreement([here, here | {"is_last": True}])
    assert "rank 1: train, epoch 0, batch 4" in disagreement([here, here | {"batch": 4}])
    assert "drew different samples" in disagreement([here, here | {"order": 8}])
