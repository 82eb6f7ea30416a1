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
        for message in _messages([math.prod(box.sizes) * dtype.itemsize for _, box, dtype in boxes]):
            sent = [next(own).tensor.cpu() for _ in message] if rank == world.rank else None
            flat = carry_to_first_(_joined(sent, [size for _, size in message]), world, source=rank)
            if world.is_first:
                parts = flat.split([size for _, size in message])
                for (name, box, dtype), part in zip((boxes[index] for index, _ in message), parts, strict=True):
                    box.of(full[name]).copy_(_as(dtype, part).view(box.sizes))
    return full


def gather_on_all_ranks(pieces: Pieces, world: Axis) -> dict[str, Tensor]:
    """The unsharded tensors on every rank. Collective over `world`, in host memory; ValueError as the above."""
    full = gather_on_first_rank(pieces, world)
    shapes = broadcast_object({name: (one.shape, one.dtype) for name, one in full.items()}, world)
    if not world.is_first:
        full = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    tensors = [one for one in full.values() if one.numel()]
    for message in _messages([one.nbytes for one in tensors]):
        held = [tensors[index] for index, _ in message]
        sizes = [size for _, size in message]
        # Of one tensor these are its own bytes.
        flat = broadcast_(_joined(held, sizes), world)
        for one, part in zip(held, flat.split(sizes), strict=True):
            one.view(-1).view(torch.uint8).copy_(part)
    return full


def _messages(sizes_bytes: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Tensors that go in one message, by their place and size in bytes: small ones together, large ones alone."""
    message: list[tuple[int, int]] = []
    for index, size in enumerate(sizes_bytes):
        if message and sum(held for _, held in message) + size > _MESSAGE_BYTES:
            yield message
            message = []
        message.append((index, size))
    if message:
        yield message


def _joined(tensors: Sequence[Tensor] | None, sizes_bytes: Sequence[int]) -> Tensor:
    """The bytes of tensors one after the other, or room for as many."""
    if tensors is None:
        return torch.empty(sum(sizes_bytes), dtype=torch.uint8)
    # Messages know fewer dtypes than checkpoints. Of one tensor that is contiguous this is no copy.
    flat = [one.detach().contiguous().view(-1).view(torch.uint8) for one in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _as(dtype: torch.dtype, part: Tensor) -> Tensor:
    """The elements of bytes that may begin anywhere in a message."""
    return (part if part.storage_offset() % dtype.itemsize == 0 else part.clone()).view(dtype)
