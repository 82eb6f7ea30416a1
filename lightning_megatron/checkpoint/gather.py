"""Gathering of sharded tensors in the host memory of the first rank, for a checkpoint that is one file.

The ranks agree who sends which box, as they agree who writes it in a directory; then the first rank receives one box
after the other. No other rank holds more than its own pieces, and one box on its way.
"""

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
        for name, box, dtype in boxes if carries_to_first(world, rank) else []:
            tensor = next(own).tensor.cpu() if rank == world.rank else torch.empty(box.sizes, dtype=dtype)
            # Of a tensor that is not contiguous a copy, which is what the first rank then takes.
            flat = carry_to_first_(_bytes_of(tensor), world, source=rank)
            if world.is_first:
                box.of(full[name]).copy_(flat.view(dtype).view(box.sizes))
    return full


def gather_on_all_ranks(pieces: Pieces, world: Axis) -> dict[str, Tensor]:
    """The unsharded tensors on every rank. Collective over `world`, in host memory; ValueError as the above."""
    full = gather_on_first_rank(pieces, world)
    shapes = broadcast_object({name: (one.shape, one.dtype) for name, one in full.items()}, world)
    for name, (shape, dtype) in shapes.items():
        held = full[name] if world.is_first else torch.empty(shape, dtype=dtype)
        if held.numel():
            broadcast_(held.view(-1).view(torch.uint8), world)
        full[name] = held
    return full


def _bytes_of(tensor: Tensor) -> Tensor:
    # Messages know fewer dtypes than checkpoints.
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
