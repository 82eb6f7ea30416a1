"""Exchange of keys and values between groups of ranks, and the return of their gradients.

An exchange visits every group's keys and values, its own first, and takes this rank's part of their gradients, group by
group in the same order. Messages are in flight while the caller computes.

    ring         from each rank to the next; gradients follow one step after their keys and values
    all-gather   all at once, and one reduce-scatter back: fewer messages, and memory for the full stream

B batch, G key groups, K keys of a group of ranks, D head size, O groups of ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron.comm.collectives import Pending, all_gather, reduce_scatter
from lightning_megatron.comm.ring import pass_on
from lightning_megatron.mesh import Axis

Pair = tuple[Tensor, Tensor]
"""Keys and values, or their gradients, each [B, G, K, D]."""


class GradientReturn(Protocol):
    """Gradients of keys and values on their way to the ranks that own them."""

    def add(self, source: int, part: Pair | None) -> None:
        """Adds this rank's part of the gradients for keys and values of `source`; None if it saw none of them."""

    def finish(self) -> Pair:
        """Gradients of this rank's keys and values, summed over all ranks, once they have arrived."""


class KeyValueExchange(Protocol):
    """Way of exchanging keys and values: equal on all ranks of the axis, and each rank runs it to its end."""

    def visits(self, own: Pair, axis: Axis) -> Iterator[tuple[int, Pair]]:
        """Rank of each group on the axis, with its keys and values, which must not be written."""

    def returns(self, like: Tensor, axis: Axis) -> GradientReturn:
        """Return of gradients for keys and values shaped like `like` [B, G, K, D], in float32 or wider."""


@dataclass(frozen=True)
class RingExchange:
    """Ring exchange, from each rank to the next."""

    def visits(self, own: Pair, axis: Axis) -> Iterator[tuple[int, Pair]]:
        pair, joined = own, None
        for step in range(axis.size):
            pending = None
            # Nobody needs the keys of the last step.
            if step + 1 < axis.size:
                joined = _joined(own) if joined is None else joined
                pending = pass_on(joined, axis, wait=False)
            yield (axis.rank - step) % axis.size, pair
            if pending is not None:
                joined = pending.wait()
                pair = (joined[0], joined[1])

    def returns(self, like: Tensor, axis: Axis) -> GradientReturn:
        return _RingGradientReturn(like, axis)


class _RingGradientReturn:
    """Gradients that travel one step after their keys and values, each rank adding its part; after the last rank they
    are with their owner."""

    def __init__(self, like: Tensor, axis: Axis) -> None:
        self._like, self._axis = like, axis
        self._own: Pair | None = None
        self._pending: Pending | None = None

    def add(self, source: int, part: Pair | None) -> None:
        if source == self._axis.rank:
            self._own = part
        else:
            self._pending = pass_on(_add_(self._arrived(), part), self._axis, wait=False)

    def finish(self) -> Pair:
        if self._pending is None and self._own is not None:
            return self._own
        keys, values = _add_(self._arrived(), self._own)
        return keys, values

    def _arrived(self) -> Tensor:
        return _zeros(self._like, 2) if self._pending is None else self._pending.wait()


@dataclass(frozen=True)
class AllGatherExchange:
    """All-gather exchange, all groups at once."""

    def visits(self, own: Pair, axis: Axis) -> Iterator[tuple[int, Pair]]:
        pending = all_gather(_joined(own).unsqueeze(0), axis, wait=False)
        yield axis.rank, own
        joined_O = pending.wait()
        for source in range(axis.size):
            if source != axis.rank:
                yield source, (joined_O[source, 0], joined_O[source, 1])

    def returns(self, like: Tensor, axis: Axis) -> GradientReturn:
        return _AllGatherGradientReturn(like, axis)


class _AllGatherGradientReturn:
    """Gradients of all groups side by side."""

    def __init__(self, like: Tensor, axis: Axis) -> None:
        self._axis = axis
        self._joined_O = _zeros(like, axis.size, 2)

    def add(self, source: int, part: Pair | None) -> None:
        _add_(self._joined_O[source], part)

    def finish(self) -> Pair:
        ((keys, values),) = reduce_scatter(self._joined_O, self._axis)
        return keys, values


def _joined(pair: Pair) -> Tensor:
    """Keys and values as one contiguous tensor, [2, B, G, K, D]."""
    return torch.stack(pair).contiguous()


def _zeros(like: Tensor, *sizes: int) -> Tensor:
    """Zeros for gradients of `like` in float32 or wider, with leading dims `sizes`."""
    return like.new_zeros((*sizes, *like.shape), dtype=torch.promote_types(like.dtype, torch.float32))


def _add_(joined: Tensor, part: Pair | None) -> Tensor:
    """`joined`, with the part added."""
    if part is not None:
        joined[0].add_(part[0])
        joined[1].add_(part[1])
    return joined
