"""Copies in host memory, so that training may go on while they are written.

The buffers are made once and used for every save: page-locked where the tensors are on a GPU, one for each box, because
`torch.save` writes all of the memory that a tensor owns.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_megatron.checkpoint.plan import Item


class Staging:
    """Buffers for the boxes that this rank writes."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def copy(self, items: Sequence[Item]) -> list[Item]:
        """The items in host memory, until the next call; all copies have landed."""
        if not _fit(self._buffers, items):
            self._buffers = [_buffer(item.tensor) for item in items]
        devices = set()
        for buffer, item in zip(self._buffers, items, strict=True):
            buffer.copy_(item.tensor, non_blocking=True)
            if item.tensor.is_cuda:
                devices.add(item.tensor.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return [Item(item.name, item.box, buffer) for buffer, item in zip(self._buffers, items, strict=True)]

    def release(self) -> None:
        """Gives the memory back."""
        self._buffers = []


def one_by_one(items: Sequence[Item]) -> Iterator[Item]:
    """The items in host memory, each gone before the next: for a save that training waits for."""
    for item in items:
        yield Item(item.name, item.box, _buffer(item.tensor).copy_(item.tensor))


def _buffer(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _fit(buffers: Sequence[Tensor], items: Sequence[Item]) -> bool:
    return len(buffers) == len(items) and all(
        buffer.shape == item.tensor.shape
        and buffer.dtype == item.tensor.dtype
        and buffer.is_pinned() == item.tensor.is_cuda
        for buffer, item in zip(buffers, items, strict=True)
    )
