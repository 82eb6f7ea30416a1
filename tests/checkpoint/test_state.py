"""Which part of which tensor a rank saves."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.checkpoint.state import Piece, Slot, pieces_of_module
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.sharding import Box, Initial, shard_of, shard_parameter


def test_the_piece_of_a_padded_parameter_is_a_view_without_the_padding() -> None:
    tp = Mesh.imagine(1, Sizes(world=2, tp=2)).tp
    parameter = shard_parameter((2, 5, 3), initial=Initial(), dim=1, axis=tp)
    [piece] = pieces_of_module({"w": parameter})["w"]
    assert (piece.global_shape, piece.box) == ((2, 5, 3), Box((0, 3, 0), (2, 2, 3)))
    parameter.data.zero_()
    piece.tensor.fill_(1)
    assert parameter.sum() == 2 * 2 * 3


def test_a_slot_that_begins_within_a_padded_parameter_leaves_the_padding_out() -> None:
    tp = Mesh.imagine(1, Sizes(world=2, tp=2)).tp
    # Rows 4 to 6 of the unsplit weight, and one of padding; the slot has the last two of these four.
    parameter = shard_parameter((7, 2), initial=Initial(), dim=0, axis=tp)
    held = torch.arange(8.0).view(4, 2)
    [piece] = Slot("w", parameter, 4, 8).pieces(held.flatten()[4:])
    assert piece.box == Box((6, 0), (1, 2)) and torch.equal(piece.tensor, held[2:3])


def test_plain_parameters_and_buffers_are_unsharded() -> None:
    module = nn.BatchNorm1d(4)
    pieces = pieces_of_module(module.state_dict(keep_vars=True))
    assert pieces.keys() == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert [piece.box for piece in pieces["weight"]] == [Box((0,), (4,))]
    assert [piece.box for piece in pieces["num_batches_tracked"]] == [Box((), ())]


def test_a_tensor_that_is_not_its_box_is_refused() -> None:
    with pytest.raises(ValueError, match="must have the sizes of its box"):
        Piece((4,), Box((0,), (3,)), torch.zeros(4))
    with pytest.raises(ValueError, match="must lie within"):
        Piece((4,), Box((2,), (3,)), torch.zeros(3))


def test_a_module_name_that_reads_like_an_optimizers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'optimizer\.0\.weight' would be taken"):
        pieces_of_module({"optimizer.0.weight": torch.zeros(1)})
    pieces_of_module({"optimizer.weight": torch.zeros(1)})


def test_extra_state_of_a_module_is_refused() -> None:
    with pytest.raises(ValueError, match="'_extra_state' is a dict"):
        pieces_of_module({"_extra_state": {"a": 1}})  # type: ignore[dict-item]


@pytest.mark.parametrize(("ep", "etp", "num_parts"), [(1, 1, 1), (2, 1, 3), (1, 2, 2), (2, 2, 1), (2, 4, 5), (4, 2, 2)])
def test_the_pieces_of_a_parameter_cut_along_two_dims_are_the_full_tensor_once(
    ep: int, etp: int, num_parts: int
) -> None:
    full = torch.arange(4 * 2 * 5 * 3.0).view(4, 2, 5, 3) + 1.0
    found = torch.zeros_like(full)
    for rank in range(ep * etp):
        mesh = Mesh.imagine(rank, Sizes(world=ep * etp, ep=ep, etp=etp))
        axes = {"axis": mesh.axis("etp"), "leading": mesh.axis("ep")}
        parameter = shard_parameter(tuple(full.shape), initial=Initial(), dim=2, **axes)
        held = torch.full_like(parameter, -1.0)
        shard_of(parameter).valid(held).copy_(shard_of(parameter).part_of(full))
        bounds = [held.numel() * part // num_parts for part in range(num_parts + 1)]
        for start, end in pairwise(bounds):
            for piece in Slot("experts", parameter, start, end).pieces(held.flatten()[start:end]):
                assert piece.global_shape == full.shape
                place = piece.box.of(found)
                assert place.count_nonzero() == 0
                place.copy_(piece.tensor)
    assert torch.equal(found, full)


@pytest.mark.parametrize(("shape", "dim"), [((12, 3), 0), ((2, 12), 1), ((12,), 0)])
@pytest.mark.parametrize(("tp", "blocks"), [(2, 3), (2, 2), (3, 2)])
def test_the_pieces_of_a_parameter_of_several_blocks_are_the_full_tensor_once(
    shape: tuple[int, ...], dim: int, tp: int, blocks: int
) -> None:
    full = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    whole, of_parts = torch.zeros_like(full), torch.zeros_like(full)
    for rank in range(tp):
        axis = Mesh.imagine(rank, Sizes(world=tp, tp=tp)).tp
        parameter: Any = shard_parameter(shape, initial=Initial(), dim=dim, axis=axis)
        parameter.shard = replace(parameter.shard, blocks=blocks)
        assert parameter.shard.is_cut
        parameter.data.copy_(parameter.shard.part_of(full))
        for piece in pieces_of_module({"w": parameter})["w"]:
            piece.box.of(whole).add_(piece.tensor)
        bounds = [0, 1, 3, parameter.numel()]
        for start, end in pairwise(bounds):
            for piece in Slot("w", parameter, start, end).pieces(parameter.detach().flatten()[start:end]):
                piece.box.of(of_parts).add_(piece.tensor)
    assert torch.equal(whole, full) and torch.equal(of_parts, full)
    # As one block it would be another part.
    assert not torch.equal(replace(parameter.shard, blocks=1).part_of(full), parameter.detach())
