"""Which part of which tensor a rank saves."""

import pytest
import torch
from torch import nn

from lightning_megatron.checkpoint.state import Piece, pieces_of_module
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.sharding import Box, Initial, shard_parameter


def test_the_piece_of_a_padded_parameter_is_a_view_without_the_padding() -> None:
    tp = Mesh.imagine(1, Sizes(world=2, tp=2)).tp
    parameter = shard_parameter((2, 5, 3), initial=Initial(), dim=1, axis=tp)
    piece = pieces_of_module({"w": parameter})["w"]
    assert (piece.global_shape, piece.box) == ((2, 5, 3), Box((0, 3, 0), (2, 2, 3)))
    parameter.data.zero_()
    piece.tensor.fill_(1)
    assert parameter.sum() == 2 * 2 * 3


def test_plain_parameters_and_buffers_are_whole() -> None:
    module = nn.BatchNorm1d(4)
    pieces = pieces_of_module(module.state_dict(keep_vars=True))
    assert pieces.keys() == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert pieces["weight"].box == Box((0,), (4,))
    assert pieces["num_batches_tracked"].box == Box((), ())


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
