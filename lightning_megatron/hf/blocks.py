"""Mapping of one of our tensors to those of a Hugging Face model: equal parts, each a box on either side.

A row of a family's table names tensors and a layout; the layout lists blocks. Reading fills any box of ours from the
boxes of theirs that it needs, writing fills theirs from ours, by the same list, so that one undoes the other.

H hidden, F feed-forward, G key-value groups, R query heads of a group, D head size, E experts.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.sharding import Box
from lightning_megatron.transformer.config import TransformerConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorBlock:
    """A box of one of our tensors that is a box of one of theirs."""

    ours: Box
    theirs: Box
    source: int
    """Index of theirs among the tensors of the row."""
    dims: tuple[int, ...]
    """Our dim along which each dim of theirs runs; our other dims have extent 1."""

    def from_theirs(self, theirs: Tensor) -> Tensor:
        """Values of the block, or of a part of it, with our dims."""
        value = theirs.permute(sorted(range(theirs.dim()), key=self.dims.__getitem__))
        for dim in range(len(self.ours.sizes)):
            if dim not in self.dims:
                value = value.unsqueeze(dim)
        return value

    def to_theirs(self, ours: Tensor) -> Tensor:
        """Values of the block with the dims of theirs."""
        others = [dim for dim in range(ours.dim()) if dim not in self.dims]
        return ours.permute(*self.dims, *others).flatten(len(self.dims) - 1) if others else ours.permute(self.dims)

    def overlap(self, box: Box) -> tuple[Box, Box] | None:
        """Intersection of the block with a box of ours: a box of ours and one of theirs; None where it is empty."""
        starts = [max(a, b) for a, b in zip(self.ours.offsets, box.offsets, strict=True)]
        ends = [min(a, b) for a, b in zip(_ends(self.ours), _ends(box), strict=True)]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        if any(size <= 0 for size in sizes):
            return None
        offsets = tuple(
            self.theirs.offsets[i] + starts[dim] - self.ours.offsets[dim] for i, dim in enumerate(self.dims)
        )
        return Box(tuple(starts), sizes), Box(offsets, tuple(sizes[dim] for dim in self.dims))


Layout = Callable[[TransformerConfig, Shape], tuple[TensorBlock, ...]]
"""The blocks of one of our tensors of that shape."""


def shapes_of_sources(blocks: Iterable[TensorBlock]) -> list[Shape]:
    """Shape of each of their tensors, as the blocks fill it."""
    ends: dict[int, list[list[int]]] = {}
    for block in blocks:
        ends.setdefault(block.source, []).append(_ends(block.theirs))
    return [tuple(map(max, zip(*ends[source], strict=True))) for source in range(len(ends))]


def part(tensor: Tensor, box: Box, offsets: Shape | None = None) -> Tensor:
    """The view of a tensor, or of one that begins at `offsets`, within the box."""
    starts = box.offsets if offsets is None else [a - b for a, b in zip(box.offsets, offsets, strict=True)]
    for dim, (start, size) in enumerate(zip(starts, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def fill_ours(out: Tensor, box: Box, blocks: Iterable[TensorBlock], read: Callable[[int, Box], Tensor]) -> None:
    """Writes a box of ours to `out`; `read(source, box)` gives parts of theirs. The dtype is that of `out`."""
    num_filled = 0
    for block in blocks:
        found = block.overlap(box)
        if found is not None:
            ours, theirs = found
            part(out, ours, box.offsets).copy_(block.from_theirs(read(block.source, theirs)))
            num_filled += math.prod(ours.sizes)
    assert num_filled == math.prod(box.sizes), "the blocks of a layout cover our tensor once"


def fill_theirs(out: Tensor, source: int, blocks: Iterable[TensorBlock], ours: Tensor) -> None:
    """Writes to `out`, one of theirs, the values of our unsharded tensor, by the blocks."""
    for block in blocks:
        if block.source == source:
            part(out, block.theirs).copy_(block.to_theirs(part(ours, block.ours)))


def identity(config: TransformerConfig, shape: Shape) -> tuple[TensorBlock, ...]:
    """Layout of a tensor that is the same on both sides."""
    box = Box((0,) * len(shape), shape)
    return (TensorBlock(box, box, 0, tuple(range(len(shape)))),)


def transposed(config: TransformerConfig, shape: Shape) -> tuple[TensorBlock, ...]:
    """Layout of a matrix that they store as [in, out]."""
    return (TensorBlock(Box((0, 0), shape), Box((0, 0), shape[::-1]), 0, (1, 0)),)


def each(config: TransformerConfig, shape: Shape) -> tuple[TensorBlock, ...]:
    """Layout of [N, ...] of ours as N tensors [...] of theirs: one of each expert, or gate and up."""
    theirs = Box((0,) * (len(shape) - 1), shape[1:])
    dims = tuple(range(1, len(shape)))
    return tuple(TensorBlock(Box((e, *theirs.offsets), (1, *shape[1:])), theirs, e, dims) for e in range(shape[0]))


def gate_and_up_of_each(config: TransformerConfig, shape: Shape) -> tuple[TensorBlock, ...]:
    """Layout of [E, 2, F, H] of ours as two tensors [F, H] of theirs for each expert: gate, up."""
    theirs = Box((0, 0), shape[2:])
    return tuple(
        TensorBlock(Box((e, i, 0, 0), (1, 1, *shape[2:])), theirs, 2 * e + i, (2, 3))
        for e in range(shape[0])
        for i in range(2)
    )


def gate_and_up_in_rows(config: TransformerConfig, shape: Shape) -> tuple[TensorBlock, ...]:
    """Layout of [E, 2, F, H] of ours as one tensor [E, 2F, H] of theirs: of each expert first gate, then up."""
    num_experts, _, width, hidden = shape
    sizes = (num_experts, width, hidden)
    return tuple(
        TensorBlock(Box((0, i, 0, 0), (num_experts, 1, width, hidden)), Box((0, i * width, 0), sizes), 0, (0, 2, 3))
        for i in range(2)
    )


def interleaved_tails(shape: Shape, num_rows: int, num_turned: int) -> tuple[TensorBlock, ...]:
    """Blocks of so many rows each, of whose last `num_turned` theirs turn as neighbours, and ours as halves."""
    found: list[TensorBlock] = []
    plain, pairs = num_rows - num_turned, num_turned // 2
    for first in range(0, shape[0], num_rows):
        found.append(_rows(shape, first, first, plain, 0))
        turned = first + plain
        found += (
            _rows(shape, turned + pair + half * pairs, turned + 2 * pair + half, 1, 0)
            for pair in range(pairs)
            for half in (0, 1)
        )
    return tuple(found)


def interleaved_gate_and_up(config: TransformerConfig, shape: Shape) -> tuple[TensorBlock, ...]:
    """Layout of [E, 2, F, ...] of ours as [E, ..., 2F] of theirs, in which gate and up take turns."""
    num_experts, _, width, *rest = shape
    sizes, dims = (num_experts, 1, 1, *rest), (0, *range(3, len(shape)), 2)
    begin = (0,) * len(rest)
    return tuple(
        TensorBlock(Box((0, i, f, *begin), sizes), Box((0, *begin, 2 * f + i), (num_experts, *rest, 1)), 0, dims)
        for f in range(width)
        for i in range(2)
    )


def transposed_of_each(config: TransformerConfig, shape: Shape) -> tuple[TensorBlock, ...]:
    """Layout of matrices [E, out, in] that they store as [E, in, out]."""
    theirs = (shape[0], shape[2], shape[1])
    return (TensorBlock(Box((0, 0, 0), shape), Box((0, 0, 0), theirs), 0, (0, 2, 1)),)


def query_key_value(config: TransformerConfig, shape: Shape) -> tuple[TensorBlock, ...]:
    """Layout of our interleaved groups as three tensors of theirs, each with all groups: queries, keys, values."""
    return tuple(_rows(shape, ours, theirs, num_rows, source) for ours, theirs, num_rows, source in _heads(config))


def joined_query_key_value(config: TransformerConfig, shape: Shape) -> tuple[TensorBlock, ...]:
    """Layout as of `query_key_value`, with the three of theirs joined into one."""
    width = config.num_attention_heads * config.head_dim
    starts = (0, width, width + config.num_query_groups * config.head_dim)
    return tuple(_rows(shape, ours, starts[source] + theirs, n, 0) for ours, theirs, n, source in _heads(config))


def joined_query_key_value_columns(config: TransformerConfig, shape: Shape) -> tuple[TensorBlock, ...]:
    """Layout as of `joined_query_key_value`, with a matrix of theirs stored as [in, out]."""
    rows = joined_query_key_value(config, shape)
    return tuple(TensorBlock(b.ours, Box(b.theirs.offsets[::-1], b.theirs.sizes[::-1]), 0, (1, 0)) for b in rows)


def joined(config: TransformerConfig, shape: Shape) -> tuple[TensorBlock, ...]:
    """Layout of [2, F, ...] of ours as one tensor [2F, ...] of theirs: gate, then up."""
    rest, dims = (0,) * (len(shape) - 2), tuple(range(1, len(shape)))
    sizes = (1, *shape[1:])
    return tuple(
        TensorBlock(Box((i, 0, *rest), sizes), Box((i * shape[1], *rest), shape[1:]), 0, dims) for i in range(shape[0])
    )


def interleaved_query_key_value(config: TransformerConfig, shape: Shape) -> tuple[TensorBlock, ...]:
    """Layout as of `query_key_value`, where of theirs neighbours turn as a pair, and not the halves of what turns."""
    size, pairs = config.head_dim, config.rotary_width
    found: list[TensorBlock] = []
    for ours, theirs, num_rows, source in _heads(config):
        turned = 0 if source == 2 else 2 * pairs
        for head in range(0, num_rows, size):
            of_ours, of_theirs = ours + head, theirs + head
            for pair in range(turned // 2):
                found += (
                    _rows(shape, of_ours + pair + half * pairs, of_theirs + 2 * pair + half, 1, source)
                    for half in (0, 1)
                )
            if turned < size:
                found.append(_rows(shape, of_ours + turned, of_theirs + turned, size - turned, source))
    return tuple(found)


def _heads(config: TransformerConfig) -> Iterator[tuple[int, int, int, int]]:
    """First row in our fused weight, first row in theirs, number of rows and which of theirs: q, k or v."""
    size, queries = config.head_dim, config.heads_per_group
    for group in range(config.num_query_groups):
        first = group * (queries + 2) * size
        yield first, group * queries * size, queries * size, 0
        yield first + queries * size, group * size, size, 1
        yield first + (queries + 1) * size, group * size, size, 2


def _rows(shape: Shape, ours: int, theirs: int, num_rows: int, source: int) -> TensorBlock:
    rest, sizes = (0,) * (len(shape) - 1), (num_rows, *shape[1:])
    return TensorBlock(Box((ours, *rest), sizes), Box((theirs, *rest), sizes), source, tuple(range(len(shape))))


def _ends(box: Box) -> list[int]:
    return [offset + size for offset, size in zip(box.offsets, box.sizes, strict=True)]


def empty_source(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Memory for one of their tensors on the CPU."""
    return torch.empty(shape, dtype=dtype, device="cpu")
