"""The indices that a training loader reads, begun after those read before, or cut for another data-parallel size."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.resume import rng_state
from lightning_megatron.trainer.resume.rng_state import States
from lightning_megatron.trainer.step.global_batches import GlobalBatches, cut_of

AllStates = dict[str, Any]
"""The default generators and those that the user gave a loader."""

# What a DataLoader is made of, apart from its dataset and its samplers.
_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


@runtime_checkable
class Stateful(Protocol):
    """Loader that can save and load its position, as those of torchdata do."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Indices:
    """The index batches of a loader, which may begin after some of them.

    Torch starts them after it has drawn a seed for its workers; so does this.
    """

    def __init__(self, loader: DataLoader[Any], dp: Axis, epoch: Callable[[], int]) -> None:
        self._base: Iterable[Any] = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        # The user's own, where the ranks read their parts of what it draws.
        self._drawn = self._base.base if isinstance(self._base, GlobalBatches) else self._base
        self._loader = loader
        self._dp = dp
        self._epoch = epoch
        self.order = order_of(loader, dp)
        # Whether `order` is a checkpoint's, instead of the samplers' own.
        self.is_followed = False
        # States of all generators when this round's indices began.
        self.round_start: AllStates | None = None
        self.begin_from: States | None = None
        self._prepared: Iterator[Any] | None = None

    @property
    def batch_size(self) -> int | None:
        """Samples of a batch of one data-parallel rank, where all batches have the same number."""
        size = getattr(self._drawn, "batch_size", self._loader.batch_size)
        return size if isinstance(size, int) else None

    def __len__(self) -> int:
        return len(self._base)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if self._prepared is not None:
            prepared, self._prepared = self._prepared, None
            yield from prepared
            return
        if self.begin_from is not None:
            rng_state.set_states(self.begin_from)
            self.begin_from = None
        self.round_start = all_states(self._loader)
        yield from self._batches(0)

    def follow(self, order: dict[str, Any], *, is_moved: bool, is_within: bool) -> None:
        """Takes a checkpoint's order of samples where this loader's is another one, from now on."""
        if order == self.order and order["name"] != "other":
            # The samplers are rerun: what they draw does not depend on how many ranks share it.
            return
        is_other = (order["name"] == "distributed") != (self.order["name"] == "distributed")
        if not (is_moved or is_other or _differ_in_seed(order, self.order)):
            return
        known = not {"own", "other"} & {order["name"], self.order["name"]}
        if known and order["samples"] == self.order["samples"]:
            if order["name"] != self.order["name"] or _differ_in_seed(order, self.order):
                rank_zero_info(f"the training data goes on in the checkpoint's order: {_order_text(order)}")
            self.order, self.is_followed = order, True
        elif is_within:
            raise ConfigurationError(
                "the checkpoint lies within an epoch of a loader whose samples cannot be found again with this "
                "data-parallel size and this loader: it may have given each data-parallel rank any samples "
                "(use_distributed_sampler=False), or its sampler, batch sampler or dataset was another one; resume "
                "with the same data-parallel size and loader, resume a checkpoint from the end of an epoch, or use a "
                "loader with state_dict and load_state_dict"
            )

    def skip(self, batches: int, samples: int, round_start: AllStates | None) -> None:
        """Makes the next round begin after some batches, which hold so many samples over all data-parallel ranks.

        `round_start` is None where no batch's indices had been drawn.
        """
        if round_start is None:
            return
        self.round_start = round_start
        with rng_state.forked():
            set_all_states(self._loader, round_start)
            if self.is_followed:
                self._prepared = self._batches(samples, batches)
            else:
                skipped = self._base_from(batches)
                # Samplers draw when their first index is taken.
                self._prepared = skipped if batches else chain(list(islice(skipped, 1)), skipped)

    def _base_from(self, batches: int) -> Iterator[Any]:
        found = iter(self._base)
        for _ in islice(found, batches):
            pass
        return found

    def _batches(self, samples: int, batches: int = 0) -> Iterator[Any]:
        """The index batches after so many samples of all ranks, which are that many batches of each."""
        if not self.is_followed:
            return iter(self._base)
        assert isinstance(self._drawn, BatchSampler)
        rest = self._global_order()[samples:]
        if isinstance(self._base, GlobalBatches):
            return self._base.part_of(BatchSampler(rest, self._drawn.batch_size, self._drawn.drop_last), batches)
        if missing := -len(rest) % self._dp.size:
            rest += rest[:missing] if len(rest) >= missing else rest * missing
        own = rest[self._dp.rank :: self._dp.size]
        return iter(BatchSampler(own, self._drawn.batch_size, self._drawn.drop_last))

    def _global_order(self) -> list[int]:
        """The samples of an epoch over all data-parallel ranks."""
        samples = range(self.order["samples"])
        if self.order["name"] == "sequential":
            return list(samples)
        if self.order["name"] == "random":
            explicit = explicit_generators(self._loader)
            if not explicit:
                # RandomSampler draws its seed so; all data-parallel ranks share one.
                seed = int(torch.empty((), dtype=torch.int64).random_().item())
                explicit = [torch.Generator().manual_seed(collectives.broadcast_object(seed, self._dp))]
            return list(RandomSampler(samples, generator=explicit[0]))
        full: DistributedSampler[int] = DistributedSampler(
            samples,  # type: ignore[arg-type]
            num_replicas=1,
            rank=0,
            shuffle=self.order["shuffle"],
            seed=self.order["seed"],
        )
        full.set_epoch(self._epoch())
        return list(full)


def order_of(loader: DataLoader[Any], dp: Axis) -> dict[str, Any]:
    """Rule by which a loader orders the samples of all data-parallel ranks.

    `own`: as the user's samplers draw, which all ranks rerun alike. `other`: each rank may have samples of its own.
    """
    sampler, batches = loader.sampler, loader.batch_sampler
    is_shared = dp.size == 1 or cut_of(loader) is not None
    drawn: Any = sampler if batches is None else batches
    drawn = drawn.base if isinstance(drawn, GlobalBatches) else drawn
    is_plain = type(drawn) is BatchSampler and drawn.sampler is sampler
    samples = sized_len(loader.dataset)
    if is_plain and type(sampler) is DistributedSampler and sampler.num_replicas == dp.size:
        return {"name": "distributed", "samples": samples, "shuffle": sampler.shuffle, "seed": sampler.seed}
    if not is_shared:
        return {"name": "other"}
    if is_plain and type(sampler) is SequentialSampler:
        return {"name": "sequential", "samples": samples}
    if is_plain and type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == samples:
        return {"name": "random", "samples": samples}
    kind = type(sampler if type(drawn) is BatchSampler else drawn)
    # Of a user's batch sampler the batches depend on their size, and of any other sampler only how they are cut.
    size = None if type(drawn) is BatchSampler else getattr(drawn, "batch_size", None)
    return {"name": "own", "samples": samples, "kind": f"{kind.__module__}.{kind.__qualname__}", "batch_size": size}


def _differ_in_seed(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["name"] == other["name"] == "distributed" and one["seed"] != other["seed"])


def _order_text(order: dict[str, Any]) -> str:
    if order["name"] == "distributed":
        return f"that of DistributedSampler, seed {order['seed']}, {'shuffled' if order['shuffle'] else 'not shuffled'}"
    return {"sequential": "as the dataset has them", "random": "shuffled as on one data-parallel rank"}[order["name"]]


def reads_indices(loader: Any) -> bool:
    """Whether the loader reads a dataset by indices, in torch's own way."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader, Stateful)
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader)._get_iterator is DataLoader._get_iterator
    )


def reading(loader: DataLoader[Any], indices: Indices) -> DataLoader[Any]:
    """A loader like this one that takes its indices from `indices`."""
    options = {name: getattr(loader, name) for name in _OPTIONS}
    if loader.batch_sampler is None:
        return DataLoader(loader.dataset, batch_size=None, sampler=indices, **options)
    return DataLoader(loader.dataset, batch_sampler=indices, **options)


def explicit_generators(loader: Any) -> list[torch.Generator]:
    """The generators that the user gave the loader or its samplers."""
    cut, batches = cut_of(loader), getattr(loader, "batch_sampler", None)
    drawn = batches if cut is None else cut.base
    # The sampler below a batch sampler of the user's is not the loader's.
    owners = (loader, getattr(loader, "sampler", None), drawn, getattr(drawn, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    unique = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
    return list(unique.values())


def all_states(loader: Any) -> AllStates:
    """States of all random generators that the loader may draw from."""
    explicit = [generator.get_state() for generator in explicit_generators(loader)]
    return {"default": rng_state.states(), "explicit": explicit}


def set_all_states(loader: Any, saved: AllStates) -> None:
    """Restores states that `all_states` returned."""
    rng_state.set_states(saved["default"])
    set_explicit_states(loader, saved["explicit"])


def set_explicit_states(loader: Any, states: Sequence[torch.Tensor]) -> None:
    """Restores the states of the generators that the user gave the loader."""
    for generator, state in zip(explicit_generators(loader), states, strict=False):
        generator.set_state(state)
