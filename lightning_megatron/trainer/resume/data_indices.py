"""The indices that a training loader reads, begun after those read before, or cut for another data-parallel size."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Protocol, runtime_checkable

import torch
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
        size = getattr(self._loader.batch_sampler, "batch_size", self._loader.batch_size)
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
        if order == self.order or not (is_moved or _differ_in_seed(order, self.order)):
            return
        known = "other" not in (order["name"], self.order["name"])
        if known and order["samples"] == self.order["samples"]:
            if order["name"] != self.order["name"] or _differ_in_seed(order, self.order):
                rank_zero_info(f"the training data goes on in the checkpoint's order: {_order_text(order)}")
            self.order, self.is_followed = order, True
        elif is_within:
            raise ConfigurationError(
                "the checkpoint lies within an epoch of a loader whose sampler may give each data-parallel rank any "
                "samples, so their rest cannot be cut for another data-parallel size or batch size; resume with the "
                "same data-parallel size and batch_size, resume a checkpoint from the end of an epoch, or use a "
                "plain DataLoader(shuffle=...) or a loader with state_dict and load_state_dict"
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
                self._prepared = self._batches(samples)
            else:
                skipped = self._base_from(batches)
                # Samplers draw when their first index is taken.
                self._prepared = skipped if batches else chain(list(islice(skipped, 1)), skipped)

    def _base_from(self, batches: int) -> Iterator[Any]:
        found = iter(self._base)
        for _ in islice(found, batches):
            pass
        return found

    def _batches(self, samples: int) -> Iterator[Any]:
        if not self.is_followed:
            return iter(self._base)
        rest = self._global_order()[samples:]
        if missing := -len(rest) % self._dp.size:
            rest += rest[:missing] if len(rest) >= missing else rest * missing
        own = rest[self._dp.rank :: self._dp.size]
        assert isinstance(self._loader.batch_sampler, BatchSampler)
        return iter(BatchSampler(own, self._loader.batch_sampler.batch_size, self._loader.batch_sampler.drop_last))

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
    """Rule by which a loader orders the samples of all data-parallel ranks; `other` where it cannot be known."""
    sampler, batches = loader.sampler, loader.batch_sampler
    name, more = "other", {}
    if type(batches) is BatchSampler and batches.sampler is sampler:
        if type(sampler) is DistributedSampler and sampler.num_replicas == dp.size:
            name, more = "distributed", {"shuffle": sampler.shuffle, "seed": sampler.seed}
        elif dp.size == 1 and type(sampler) is SequentialSampler:
            name = "sequential"
        elif dp.size == 1 and type(sampler) is RandomSampler and not sampler.replacement:
            name = "random" if sampler.num_samples == len(loader.dataset) else "other"  # type: ignore[arg-type]
    return {"name": name, "samples": len(loader.dataset), **more} if name != "other" else {"name": name}  # type: ignore[arg-type]


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
    owners = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
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
