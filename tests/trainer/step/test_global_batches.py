"""An ordinary DataLoader gives every layout the global batches of one device whose batch size is that of all ranks."""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, Subset

from lightning_megatron.mesh import Axis
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.step.global_batches import GlobalBatches, cut, cut_of
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer.fits import numbers, weights
from tests.trainer.layouts import PLAIN, Layout, make_trainer, replica_of
from tests.trainer.lightning_api.test_ledger import apart
from tests.trainer.modules import Measured, samples

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step` but have no", "ignore:Your `predict_dataloader`'s sampler has shuffling"
)
ROWS = samples(40)
LAYOUTS = {
    "dp2": Layout(world=2),
    "tp2 dp2": Layout(world=4, tp=2),
    "pp2 dp2": Layout(world=4, pp=2, microbatches=2),
}
# Samples of a global batch.
BATCH = 8


class Sees(Measured):
    """Writes down which rows it is given, and all that is logged after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[list[float]] = []
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.given.append(batch[0].sum(1).tolist())
        self.logged.append(numbers(self.trainer))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_rows", float(len(batch[0])), reduce_fx="sum")
        super().test_step(batch, batch_idx)


class Backwards(Sampler[int]):
    """A sampler of the user's own: every second row, from the end, shifted by the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 13

    def __iter__(self) -> Iterator[int]:
        return iter([26 - 2 * i + self.epoch for i in range(13)])


class Neighbours(Sampler[list[int]]):
    """Batches of the user's own, each of neighbours, in a random order."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return 24 // self.size

    def __iter__(self) -> Iterator[list[int]]:
        for half in torch.randperm(3).tolist():
            yield from BatchSampler(range(8 * half, 8 * half + 8), self.size, drop_last=False)


Loader = Callable[[int], DataLoader[Any]]


def loader(rows: int, size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Subset(ROWS, range(rows)), size, **options)


LOADERS: dict[str, Loader] = {
    "in order, a last batch of three": lambda size: loader(19, size),
    "shuffled, a last batch of one": lambda size: loader(17, size, shuffle=True),
    "shuffled, without the rest": lambda size: loader(29, size, shuffle=True, drop_last=True),
    "shuffled by a worker": lambda size: loader(20, size, shuffle=True, num_workers=1, multiprocessing_context="fork"),
    "a sampler": lambda size: loader(40, size, sampler=Backwards()),
    "a generator": lambda size: loader(16, size, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "batches": lambda size: DataLoader(ROWS, batch_sampler=Neighbours(size)),
}


# After training on one of these a module predicts, in order. Each layout has one of the first two.
PREDICTED = list(LOADERS)[:2]


def loaders_for(layout: Layout) -> dict[str, Any]:
    """Every second loader, other ones where there are stages; all on one device and under `pytest --whole`."""
    names, start = list(LOADERS), layout.pp - 1
    chosen = names if layout == PLAIN else every_nth(names[start:] + names[:start], 2)
    return {name: LOADERS[name] for name in chosen}


def told(layout: Layout) -> tuple[int, dict[str, Any]]:
    """This rank's data-parallel rank, and what each loader gave it."""
    found = {}
    with warnings.catch_warnings():
        # Of last batches without a row for each rank, and Lightning's advice about shuffled validation.
        warnings.simplefilter("ignore")
        for name, make in loaders_for(layout).items():
            torch.manual_seed(1)
            module, size = Sees(), BATCH // layout.dp
            trainer = make_trainer(layout, use_distributed_sampler=True)
            trainer.fit(module, make(size), make(size))
            shown = {"seen": module.given, "logged": module.logged, "weights": weights(module)}
            shown["tested"] = trainer.test(module, make(size), verbose=False)
            if name in PREDICTED:
                shown["predicted"] = make_trainer(layout, use_distributed_sampler=True).predict(
                    module, loader(19, size)
                )
            found[name] = shown
    return replica_of(trainer)[0], found


@functools.cache
def told_by_one() -> dict[str, Any]:
    [(_, found)] = run_on_ranks(1, told, PLAIN, init=False)
    return found


def joined(parts: list[list[Any]], number: int) -> list[Any]:
    """Rows of a global batch, from those of all data-parallel ranks that have this batch."""
    return [row for part in parts if number < len(part) for row in list(part[number])]


@pytest.mark.parametrize("layout", every_nth(LAYOUTS, 2))
def test_every_layout_gets_the_global_batches_of_one_device(layout: str) -> None:
    wanted = told_by_one()
    told_by_all = run_on_ranks(LAYOUTS[layout].world, told, LAYOUTS[layout], init=False, timeout=150)
    replicas = dict(reversed(told_by_all))
    assert set(PREDICTED) & set(loaders_for(LAYOUTS[layout]))
    for name in loaders_for(LAYOUTS[layout]):
        full = wanted[name]
        seen = [replicas[rank][name]["seen"] for rank in range(2)]
        assert {len(part) for part in seen} == {len(full["seen"])}, name
        for number, rows in enumerate(full["seen"]):
            # A rank without a row of its own has a copy of one, behind the others.
            assert joined(seen, number)[: len(rows)] == rows, (name, number)
        predicted = [replicas[rank][name].get("predicted", []) for rank in range(2)]
        for number, logits in enumerate(full.get("predicted", [])):
            assert apart(torch.stack(joined(predicted, number)), logits) == [], (name, number)
        for _, ours in told_by_all:
            for what in ("logged", "weights", "tested"):
                assert apart(ours[name][what], full[what], what) == [], name
    # The orders are none that every loader would have.
    assert len({str(full["seen"]) for full in wanted.values()}) == len(wanted)
    assert wanted["a sampler"]["seen"][0] != wanted["a sampler"]["seen"][2]


def axis(rank: int, size: int = 2) -> Axis:
    return Axis("dp", size, rank, tuple(range(size)), None)


def drawn(base: Any, without_rows: Any, size: int = 2, is_batched: bool = True) -> list[list[Any]]:
    """What each rank reads."""
    parts = [
        GlobalBatches(base, axis(rank, size), is_batched=is_batched, without_rows=without_rows) for rank in range(size)
    ]
    batches = [list(part) for part in parts]
    assert [len(part) for part in parts] == [len(own) for own in batches]
    return batches


@pytest.mark.filterwarnings("ignore:the last global batch")
def test_a_last_smaller_batch_is_spread_repeated_ended_or_left_out() -> None:
    base = BatchSampler(range(11), 2, drop_last=False)
    for kind in ("repeat", "end", "drop"):
        assert drawn(base, kind) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]
    one_over = BatchSampler(range(9), 2, drop_last=False)
    assert drawn(one_over, "repeat") == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [8]]]
    assert drawn(one_over, "end") == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]
    assert drawn(one_over, "drop") == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert drawn(BatchSampler(range(11), 2, drop_last=True), "repeat") == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    # Each index is a batch.
    assert drawn(range(5), "repeat", is_batched=False) == [[0, 2, 4], [1, 3, 4]]
    # A batch of the user's own is not cut, but in the rest.
    assert drawn([[0, 1, 2], [3], [4, 5]], "repeat") == [[[0, 1, 2], [4]], [[3], [5]]]


def test_a_rest_without_a_row_for_each_rank_is_told() -> None:
    with pytest.warns(UserWarning, match=r"the training DataLoader has 1 samples, .* ranks \(2\): .* repeat a sample"):
        cut(loader(9, 2), axis(0), "repeat", "training")
    with pytest.warns(UserWarning, match="it is left out of each epoch. Use drop_last=True"):
        cut(loader(9, 2), axis(0), "drop", "training")
    with pytest.raises(ConfigurationError, match="the prediction DataLoader draws 1 samples for 2 data-parallel ranks"):
        cut(loader(1, 2), axis(0), "end", "prediction")


def test_a_loader_is_cut_once_and_keeps_its_class_and_options() -> None:
    class Own(DataLoader[Any]):
        """A loader of the user's with an attribute of its own."""

        colour = "red"

    own = Own(ROWS, 2, shuffle=True)
    own.colour = "blue"
    once = cut(own, axis(1), "repeat", "training")
    twice = cut(once, axis(1), "repeat", "training")
    assert type(twice) is Own and twice.colour == "blue" and isinstance(twice.sampler, RandomSampler)
    assert cut_of(own) is None
    found = cut_of(twice)
    assert found is not None and found.base is own.batch_sampler
    assert cut(own, axis(0, 1), "repeat", "training") is own
    sharded = DataLoader(ROWS, 2, sampler=DistributedSampler(ROWS, num_replicas=2, rank=1))
    assert cut(sharded, axis(1), "repeat", "training") is sharded


class Biased(RandomSampler):
    """Draws another order on each rank."""

    def __iter__(self) -> Iterator[int]:
        rank = int(torch.distributed.get_rank())
        return iter(torch.randperm(16, generator=torch.Generator().manual_seed(rank)).tolist())


def refused(step: str) -> str:
    trainer = make_trainer(LAYOUTS["dp2"], use_distributed_sampler=True)
    try:
        getattr(trainer, step)(Sees(), loader(16, 4, sampler=Biased(range(16))))
    except RuntimeError as error:
        return str(error)
    return "done"


def hands_off(step: str) -> list[list[float]]:
    module = Sees()
    make_trainer(LAYOUTS["dp2"], max_epochs=1).fit(module, loader(12, 4))
    return module.given


@pytest.mark.parametrize("step", ["fit", "predict"])
def test_samplers_that_draw_differently_are_reported_on_all_ranks(step: str) -> None:
    for shown in run_on_ranks(2, refused, step, init=False):
        assert "drew different samples for one global batch" in shown and "use_distributed_sampler=False" in shown


def test_without_the_distributed_sampler_a_loader_is_left_as_it_is() -> None:
    rows: Tensor = ROWS.tensors[0][:12].sum(1)
    for seen in run_on_ranks(2, hands_off, "fit", init=False):
        assert seen == [part.tolist() for part in rows.split(4)]
