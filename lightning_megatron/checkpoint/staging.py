"""Copies in host memory, so that training may go on while they are written.

The buffers are made once and used for every save: page-locked where the tensors are on a GPU, one for each box, because
`torch.save` writes all of the memory that a tensor owns.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_megatron.checkpoint.plan import Item, Spot


class Staging:
    """Buffers for the boxes that this rank writes."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._spots: list[Spot] = []

    def copy(self, items: Sequence[Item]) -> list[Item]:
        """The items in host memory, until the next call; all copies have landed."""
        if not _fit(self._buffers, items):
            self._buffers = [_buffer(item.tensor) for item in items]
        self._spots = _spots(items)
        devices = set()
        for buffer, item in zip(self._buffers, items, strict=True):
            buffer.copy_(item.tensor, non_blocking=True)
            if item.tensor.is_cuda:
                devices.add(item.tensor.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return [Item(item.name, item.box, buffer) for buffer, item in zip(self._buffers, items, strict=True)]

    def holds(self, items: Sequence[Item]) -> bool:
        """Whether the last copies are these items, bit for bit."""
        return self._spots == _spots(items) and all(
            _fit([buffer], [item]) and _equal(buffer, item.tensor)
            for buffer, item in zip(self._buffers, items, strict=True)
        )

    def release(self) -> None:
        """Gives the memory back."""
        self._buffers, self._spots = [], []


def one_by_one(items: Sequence[Item]) -> Iterator[Item]:
    """The items in host memory, each gone before the next: for a save that training waits for."""
    for item in items:
        yield Item(item.name, item.box, _buffer(item.tensor).copy_(item.tensor))


def _buffer(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _spots(items: Sequence[Item]) -> list[Spot]:
    return [(item.name, item.box.offsets) for item in items]


def _equal(buffer: Tensor, tensor: Tensor) -> bool:
    # As bytes: NaN is not equal to itself. On the tensor's device, where it is fast.
    ours, theirs = (t.contiguous().view(-1).view(torch.uint8) for t in (tensor, buffer.to(tensor.device)))
    return torch.equal(ours, theirs)


def _fit(buffers: Sequence[Tensor], items: Sequence[Item]) -> bool:
    return len(buffers) == len(items) and all(
        buffer.shape == item.tensor.shape
        and buffer.dtype == item.tensor.dtype
        and buffer.is_pinned() == item.tensor.is_cuda
        for buffer, item in zip(buffers, items, strict=True)
    )
