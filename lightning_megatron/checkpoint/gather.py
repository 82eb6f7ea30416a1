"""Gathering of sharded tensors in the host memory of the first rank, for a checkpoint that is one file.

The ranks agree who sends which box, as they agree who writes it in a directory; then the first rank receives one
message after the other, each of a box or of several small ones. No other rank holds more than its own pieces, and one
message on its way.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_megatron.checkpoint.save_plan import SavePlanner
from lightning_megatron.checkpoint.state import Pieces, as_pieces
from lightning_megatron.comm.collectives import (
    broadcast_,
    broadcast_object,
    carries_to_first,
    carry_to_first_,
    gather_objects,
    gather_on_first,
)
from lightning_megatron.mesh import Axis

_MESSAGE_BYTES = 2**24
"""As many bytes of small tensors go together as cost more time than the wait for one message."""


def gather_on_first_rank(pieces: Pieces, world: Axis) -> dict[str, Tensor]:
    """The unsharded tensors on the first rank, nothing on the others. Collective over `world`, in host memory.

    Raises ValueError, on all ranks, where the pieces do not make full tensors.
    """
    planner = SavePlanner(world)
    chunks = planner.chunks(pieces)
    by_rank = gather_objects([(chunk.name, chunk.box, chunk.tensor.dtype) for chunk in chunks], world)
    shapes = {name: (tuple(held[0].global_shape), held[0].tensor.dtype) for name, held in as_pieces(pieces).items()}
    # No rank sends a tensor without elements.
    without = gather_on_first({name: one for name, one in shapes.items() if 0 in one[0]}, world)
    named = {name: one for empties in without for name, one in empties.items()} | dict(planner.tensors)
    full = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in named.items()}
    own = iter(chunks)
    for rank, boxes in enumerate(by_rank):
        if not carries_to_first(world, rank):
            continue
        sizes_bytes = [math.prod(box.sizes) * dtype.itemsize for _, box, dtype in boxes]
        for message in _messages(sizes_bytes):
            if rank == world.rank:
                flat = _joined([next(own).tensor.cpu() for _ in boxes[message]])
            else:
                flat = torch.empty(sum(sizes_bytes[message]), dtype=torch.uint8)
            carry_to_first_(flat, world, source=rank)
            if world.is_first:
                for (name, box, dtype), part in zip(boxes[message], flat.split(sizes_bytes[message]), strict=True):
                    box.of(full[name]).copy_(_as(dtype, part).view(box.sizes))
    return full


def gather_on_all_ranks(pieces: Pieces, world: Axis) -> dict[str, Tensor]:
    """The unsharded tensors on every rank. Collective over `world`, in host memory; ValueError as the above."""
    full = gather_on_first_rank(pieces, world)
    shapes = broadcast_object({name: (one.shape, one.dtype) for name, one in full.items()}, world)
    if not world.is_first:
        full = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    tensors = [one for one in full.values() if one.numel()]
    sizes_bytes = [one.nbytes for one in tensors]
    for message in _messages(sizes_bytes):
        # Of one tensor these are its own bytes.
        flat = broadcast_(_joined(tensors[message]), world)
        for one, part in zip(tensors[message], flat.split(sizes_bytes[message]), strict=True):
            one.view(-1).view(torch.uint8).copy_(part)
    return full


def _messages(sizes_bytes: Sequence[int]) -> Iterator[slice]:
    """Which of the tensors of these sizes go in each message: small ones together, large ones alone."""
    start, filled = 0, 0
    for index, size in enumerate(sizes_bytes):
        if index > start and filled + size > _MESSAGE_BYTES:
            yield slice(start, index)
            start, filled = index, 0
        filled += size
    if sizes_bytes:
        yield slice(start, len(sizes_bytes))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors, one after the other: of one that is contiguous no copy."""
    # Messages know fewer dtypes than checkpoints.
    flat = [one.detach().contiguous().view(-1).view(torch.uint8) for one in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _as(dtype: torch.dtype, part: Tensor) -> Tensor:
    """The elements of bytes that may begin anywhere in a message."""
    return (part if part.storage_offset() % dtype.itemsize == 0 else part.clone()).view(dtype)
