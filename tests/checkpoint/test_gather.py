"""Sharded tensors are whole on the first rank, or on all of them, whatever their sizes and dtypes."""

import pytest
import torch
from torch import Tensor

from lightning_megatron.checkpoint import Piece, gather
from lightning_megatron.checkpoint.gather import gather_on_all_ranks, gather_on_first_rank
from lightning_megatron.mesh import Axis, Sizes
from lightning_megatron.sharding import Box
from tests.checkpoint.small_model import mesh_of
from tests.harness.ranks import run_on_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.float64, torch.int64, torch.uint8)


def whole() -> dict[str, Tensor]:
    """Tensors of several dtypes, of which no two have as many bytes, so that elements begin anywhere."""
    shapes = [(2, 3 + index) for index in range(len(DTYPES))]
    made = {f"w{index}": torch.arange(2 * (3 + index)).view(shape) for index, shape in enumerate(shapes)}
    cut = {name: one.to(dtype) for (name, one), dtype in zip(made.items(), DTYPES, strict=True)}
    return {**cut, "scalar": torch.tensor(7.0), "empty": torch.zeros(0, 3)}


def gathered(on_all: bool, room: int) -> dict[str, Tensor]:
    world = mesh_of(Sizes(world=2, tp=2)).world
    gather._MESSAGE_BYTES = room
    pieces: dict[str, Piece] = {}
    for name, one in whole().items():
        if one.dim() == 2 and one.numel():
            # Each rank has a row.
            row = Box((world.rank, 0), (1, one.shape[1]))
            pieces[name] = Piece(tuple(one.shape), row, one[world.rank : world.rank + 1])
        else:
            pieces[name] = Piece.unsharded(one)
    return gather_on_all_ranks(pieces, world) if on_all else gather_on_first_rank(pieces, world)


@pytest.mark.parametrize("room", [1, 64, 2**24])
def test_small_tensors_go_together_and_arrive_as_they_are(room: int) -> None:
    first, other = run_on_ranks(2, gathered, False, room)
    assert not other
    for found in (first, *run_on_ranks(2, gathered, True, room)):
        assert found.keys() == whole().keys()
        for name, one in whole().items():
            assert found[name].dtype == one.dtype and torch.equal(found[name], one), name


def counted(room: int) -> int:
    sent = 0
    carry = gather.carry_to_first_

    def count(x: Tensor, axis: Axis, *, source: int) -> Tensor:
        nonlocal sent
        sent += 1
        return carry(x, axis, source=source)

    gather.carry_to_first_ = count
    gathered(False, room)
    return sent


def test_as_many_go_together_as_have_room() -> None:
    # The second rank sends its rows and the scalar.
    assert [run_on_ranks(2, counted, room)[1] for room in (1, 2**24)] == [len(DTYPES) + 1, 1]
