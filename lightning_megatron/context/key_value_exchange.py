"""How the keys and values of the other groups come to this rank, and how their gradients go home.

An exchange visits every group's keys and values, its own first, and takes, source by source in the same order, what
this rank adds to their gradients. What travels does so while the caller computes on what is here.

    ring         from each rank to the next; gradients follow one step behind what they belong to
    all-gather   all at once, and one reduce-scatter back: fewer messages, and room for the whole stream

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
    """Gradients of keys and values on their way home."""

    def add(self, source: int, part: Pair | None) -> None:
        """Takes this rank's part of the gradients of what came from `source`; None where it did not look at that."""

    def finish(self) -> Pair:
        """The gradients of the own keys and values, summed over all ranks, once they are here."""


class KeyValueExchange(Protocol):
    """A way for keys and values: the same on all ranks of the axis, and each rank goes it to its end."""

    def visits(self, own: Pair, axis: Axis) -> Iterator[tuple[int, Pair]]:
        """Each group's place on the axis with its keys and values, which are only to be read."""

    def returns(self, like: Tensor, axis: Axis) -> GradientReturn:
        """The way home for gradients of keys and values that are each like this, [B, G, K, D]; in float32 or wider."""


@dataclass(frozen=True)
class RingExchange:
    """From each rank to the next."""

    def visits(self, own: Pair, axis: Axis) -> Iterator[tuple[int, Pair]]:
        pair, joined = own, None
        for step in range(axis.size):
            pending = None
            # Nobody needs what the last step looks at.
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
    """Gradients that travel one step behind the keys and values they belong to, each rank adding its part: behind the
    last rank they are home."""

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
    """All groups' at once."""

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
    """All groups' gradients side by side."""

    def __init__(self, like: Tensor, axis: Axis) -> None:
        self._axis = axis
        self._joined_O = _zeros(like, axis.size, 2)

    def add(self, source: int, part: Pair | None) -> None:
        _add_(self._joined_O[source], part)

    def finish(self) -> Pair:
        ((keys, values),) = reduce_scatter(self._joined_O, self._axis)
        return keys, values


def _joined(pair: Pair) -> Tensor:
    """Both as one contiguous tensor, [2, B, G, K, D]."""
    return torch.stack(pair).contiguous()


def _zeros(like: Tensor, *sizes: int) -> Tensor:
    """Room for as many gradients."""
    return like.new_zeros((*sizes, *like.shape), dtype=torch.promote_types(like.dtype, torch.float32))


def _add_(joined: Tensor, part: Pair | None) -> Tensor:
    """`joined`, with the part added."""
    if part is not None:
        joined[0].add_(part[0])
        joined[1].add_(part[1])
    return joined
