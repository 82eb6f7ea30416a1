"""Batches of data-parallel ranks that make each model call together, because they share experts.

They wait for each other within every call. A rank with a batch more in evaluation would wait for ever, or take
messages of what comes after; so each round of a loader checks first that all have a batch.
"""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis


class JoinedIterable:
    """Stand-in for a loader that is no DataLoader, by which Lightning reads it."""

    def __init__(self, loader: Any, dp: Axis, device: torch.device) -> None:
        vars(self).update(getattr(loader, "__dict__", {}))
        self.uneven, self.dp, self.device = loader, dp, device
        self.length = _longest(loader, dp, device)

    def __iter__(self) -> Iterator[Any]:
        return _while_all_have(iter(self.uneven), self.dp, self.device)

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


def join_uneven(loader: Any, dp: Axis, device: torch.device) -> Any:
    """A loader that raises RuntimeError on all data-parallel ranks where some have a batch and others have none."""
    if isinstance(loader, JoinedIterable):
        # A CombinedLoader of the user keeps what an earlier run put in.
        loader = loader.uneven
    if dp.size == 1:
        return loader
    kind = JoinedDataLoader if isinstance(loader, DataLoader) else JoinedIterable
    return kind(loader, dp, device)


def _longest(loader: Any, dp: Axis, device: torch.device) -> int:
    """The most batches that the loader of a data-parallel rank has; -1 where none has a length.

    Lightning reads no batch past a length, so a rank with fewer would end without an error.
    """
    own = sized_len(loader)
    return int(collectives.all_reduce(torch.tensor(-1 if own is None else own, device=device), dp, "max").item())


def _while_all_have(batches: Iterator[Any], dp: Axis, device: torch.device) -> Iterator[Any]:
    nothing, number = object(), 0
    while True:
        batch = next(batches, nothing)
        having = torch.tensor(int(batch is not nothing), device=device)
        num = int(collectives.all_reduce(having, dp).item())
        if 0 < num < dp.size:
            raise RuntimeError(
                f"{num} of {dp.size} data-parallel ranks have a batch number {number + 1} to evaluate, the "
                "others have none; they share experts and make each model call together. Give all equally many "
                "batches, by a sampler that repeats samples, drop_last, or limit_val_batches (limit_test_batches, "
                "limit_predict_batches); or keep the ranks of experts within a model replica: "
                "expert_model_parallel_size x expert_tensor_parallel_size divides tensor x context parallel size"
            )
        if not num:
            return
        number += 1
        yield batch
