"""Whole weights out of the parts that the ranks of an axis hold, each at one of them, its owner, and back.

All ranks send the owner of a weight their parts of it, and get back theirs of what it made, in one all-to-all each way.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Box, Shard


def spread(costs: Sequence[float], num_ranks: int, load: list[float]) -> list[int]:
    """The rank that owns each of several costs: the largest first, each to the rank with the least `load` so far.

    Costs are added to `load`, which is empty or has an entry for each rank.
    """
    load += [0.0] * (num_ranks - len(load))
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owners[index] = min(range(num_ranks), key=lambda rank: (load[rank], rank))
        load[owners[index]] += costs[index]
    return owners


def whole_shape(shard: Shard) -> tuple[int, ...]:
    """Shape of a weight that no axis but that of its experts cuts."""
    first, *others = shard.global_shape
    return (first // (1 if shard.leading is None else shard.leading.size), *others)


class PartExchange:
    """Exchange of the parts of weights that an axis cuts, with their owner's rank on it for each.

    Of experts the weights are whole that no axis but that of experts cuts.
    """

    def __init__(self, axis: Axis, shards: Sequence[Shard], owners: Sequence[int]) -> None:
        self._axis, self._shards = axis, shards
        self._order = sorted(range(len(shards)), key=lambda index: owners[index])
        self._sizes = [_size(_boxes(shard, axis.rank)) for shard in shards]
        self._given = [sum(self._sizes[i] for i in self._order if owners[i] == rank) for rank in range(axis.size)]
        own = [index for index in self._order if owners[index] == axis.rank]
        self._own = {(index, rank): _boxes(shards[index], rank) for rank in range(axis.size) for index in own}
        self._taken = [sum(_size(self._own[index, rank]) for index in own) for rank in range(axis.size)]

    def gather(self, parts: Sequence[Tensor]) -> tuple[dict[int, Tensor], Tensor]:
        """The weights that this rank owns, whole, by their index; and memory for what it gives back. Collective over
        the axis."""
        sent = torch.cat([parts[index].reshape(-1) for index in self._order])
        received = collectives.all_to_all_v(sent, self._axis, self._given, self._taken)
        wholes = {index: received.new_empty(whole_shape(self._shards[index])) for index, _ in self._own}
        pieces = received.split([_size(found) for found in self._own.values()])
        for ((index, _), found), piece in zip(self._own.items(), pieces, strict=True):
            _put(piece, wholes[index], found, self._shards[index])
        return wholes, received

    def give_back(self, wholes: dict[int, Tensor], memory: Tensor) -> list[Tensor]:
        """This rank's part of each weight, flattened; frees what it owns. Collective over the axis."""
        parts = [_taken(wholes[index], found, self._shards[index]) for (index, _), found in self._own.items()]
        torch.cat([memory[:0], *parts], out=memory)
        parts.clear()
        wholes.clear()
        returned = collectives.all_to_all_v(memory, self._axis, self._taken, self._given)
        found = dict(zip(self._order, returned.split([self._sizes[index] for index in self._order]), strict=True))
        return [found[index] for index in range(len(found))]


def _boxes(shard: Shard, rank: int) -> list[Box]:
    """The parts of a weight of this rank's experts that a rank of the cutting axis holds."""
    assert shard.axis is not None
    return replace(shard, axis=replace(shard.axis, rank=rank), leading=None, global_shape=whole_shape(shard)).boxes


def _size(boxes: Sequence[Box]) -> int:
    return sum(math.prod(box.sizes) for box in boxes)


def _put(piece: Tensor, whole: Tensor, boxes: list[Box], shard: Shard) -> None:
    """Writes a rank's part of a weight, flattened, to where it is in the whole one."""
    dim = shard.dim or 0
    shape = list(boxes[0].sizes)
    shape[dim] = sum(box.sizes[dim] for box in boxes)
    for box, part in zip(boxes, piece.view(shape).split([box.sizes[dim] for box in boxes], dim), strict=True):
        box.of(whole).copy_(part)


def _taken(whole: Tensor, boxes: list[Box], shard: Shard) -> Tensor:
    """A rank's part of a weight, flattened."""
    return torch.cat([box.of(whole) for box in boxes], dim=shard.dim or 0).reshape(-1)
