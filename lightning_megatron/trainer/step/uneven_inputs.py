"""Loaders of data-parallel ranks that may have unequally many batches, where the ranks wait for each other.

They sum gradients and logged values over all of them in each step, and where they share experts wait within every model
call. A rank with a batch more would wait for ever, or take messages of what comes after; so where a loader's length
does not tell, its rounds check that all ranks have a batch.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis

_SHARED_EXPERTS = (
    "they share experts and make each model call together. Give all equally many batches, by a sampler that repeats "
    "samples, drop_last, or limit_val_batches (limit_test_batches, limit_predict_batches); or keep the ranks of "
    "experts within a model replica: expert_model_parallel_size x expert_tensor_parallel_size divides tensor x context "
    "parallel size"
)
_ALIKE = (
    "they make each step together, and would wait for each other for ever. Give all equally many, such as by "
    "limit_train_batches (limit_val_batches, limit_test_batches)"
)


class Watch(Protocol):
    """A look at the batches of a round, of which the first is that `number`."""

    def __call__(self, batches: Iterator[Any], *, number: int) -> Iterator[Any]: ...


class JoinedIterable:
    """Stand-in for a loader that is no DataLoader, by which Lightning reads it."""

    def __init__(self, loader: Any, dp: Axis, device: torch.device, *, share_experts: bool) -> None:
        vars(self).update(getattr(loader, "__dict__", {}))
        self.uneven, self.dp, self.device = loader, dp, device
        self.length = _longest(loader, dp, device)
        self.why = _SHARED_EXPERTS if share_experts else _ALIKE

    def __iter__(self) -> Iterator[Any]:
        return _while_all_have(
            iter(self.uneven), self.dp, self.device, f"to evaluate, the others have none; {self.why}"
        )

    def __len__(self) -> int:
        if self.length < 0:
            raise TypeError(f"{type(self.uneven).__name__} has no length")
        return self.length


class JoinedDataLoader(JoinedIterable, DataLoader[Any]):  # type: ignore[misc]
    """Stand-in for a DataLoader, with all its attributes; methods of a class of the user's stay with the loader itself
    (`uneven`)."""

    @property
    def _iterator(self) -> Any:
        # By this name Lightning finds the workers that it ends.
        return self.uneven._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self.uneven._iterator = iterator


def join_uneven(loader: Any, dp: Axis, device: torch.device, *, share_experts: bool = True) -> Any:
    """A loader that raises RuntimeError on all data-parallel ranks where some have a batch and others have none."""
    if isinstance(loader, JoinedIterable):
        # A CombinedLoader of the user keeps what an earlier run put in.
        loader = loader.uneven
    if dp.size == 1:
        return loader
    kind = JoinedDataLoader if isinstance(loader, DataLoader) else JoinedIterable
    return kind(loader, dp, device, share_experts=share_experts)


def training_watch(loader: Any, dp: Axis, device: torch.device, limit: int | float | None) -> Watch:
    """A watch over the rounds of a training loader that only shows by reading where it ends; `limit` is the Trainer's.

    Where Lightning reads a batch ahead, since neither a length nor a limit says which is the last, each step knows
    before it is made whether it is the last (`loader_sync`); then only the first batch of a round is looked at here.
    """
    is_read_ahead = sized_len(loader) is None and not isinstance(limit, int)
    why = f"to train on, the others have none; {_ALIKE}"
    return partial(_while_all_have, dp=dp, device=device, why=why, num_watched=1 if is_read_ahead else math.inf)


def unwatched(batches: Iterator[Any], *, number: int) -> Iterator[Any]:
    """The watch over a loader whose length says where it ends."""
    return batches


def _longest(loader: Any, dp: Axis, device: torch.device) -> int:
    """The most batches that the loader of a data-parallel rank has; -1 where none has a length.

    Lightning reads no batch past a length, so a rank with fewer would end without an error.
    """
    own = sized_len(loader)
    return int(collectives.all_reduce(torch.tensor(-1 if own is None else own, device=device), dp, "max").item())


def _while_all_have(
    batches: Iterator[Any], dp: Axis, device: torch.device, why: str, *, number: int = 0, num_watched: float = math.inf
) -> Iterator[Any]:
    """The batches, of which the first is that `number` of its round; as many as are `num_watched` are looked for on
    all ranks."""
    nothing, first = object(), number
    while number - first < num_watched:
        batch = next(batches, nothing)
        having = torch.tensor(int(batch is not nothing), device=device)
        num = int(collectives.all_reduce(having, dp).item())
        if 0 < num < dp.size:
            raise RuntimeError(f"{num} of {dp.size} data-parallel ranks have a batch number {number + 1} {why}")
        if not num:
            return
        number += 1
        yield batch
    yield from batches
