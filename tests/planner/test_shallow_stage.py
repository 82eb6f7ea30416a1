"""Which layers of a stage stand for all of them."""

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.planner.shallow_stage import (
    Block,
    LayersDifferError,
    ShallowLayers,
    blocks_of,
    kinds_of_layers,
)


@pytest.mark.parametrize(
    ("kinds", "run"),
    [
        ("Etttttttttt", "Ettt"),
        ("ttttL", "tttL"),
        ("dededededede", "dedede"),
        ("lllglllglllglllglllg", "lllglllglllg"),
        ("dddeeeeeh", "dddeeeh"),
        ("abcabc", "abcabc"),
        ("", ""),
    ],
)
def test_of_many_equal_periods_three_run_and_the_second_counts_for_all_between(kinds: str, run: str) -> None:
    blocks = blocks_of(kinds)
    assert "".join(kinds[index] for block in blocks for index in block.indices) == run
    # Every kind comes as often, and in the same order.
    counted = [kinds[block.indices.start : block.indices.stop] * block.times for block in blocks]
    assert "".join(counted) == kinds


def test_the_ends_of_a_row_run_by_themselves() -> None:
    found = [(block.indices, block.times) for block in blocks_of("tttttt")]
    assert found == [(range(1), 1), (range(1, 2), 4), (range(5, 6), 1)]


class Scaled(nn.Module):
    """A layer of a width that is told one number."""

    def __init__(self, place: int, width: int) -> None:
        super().__init__()
        self.place, self.linear = place, nn.Linear(width, width)

    def forward(self, hidden: Tensor, factor: float) -> Tensor:
        made: Tensor = self.linear(hidden) * factor
        return made


def test_layers_of_one_kind_differ_by_their_place_alone() -> None:
    kinds = kinds_of_layers([Scaled(3, 2), Scaled(4, 2), Scaled(5, 3), Scaled(6, 2)])
    assert kinds[0] == kinds[1] == kinds[3] != kinds[2]
    # Places that do not count the layers are none.
    assert len(set(kinds_of_layers([Scaled(3, 2), Scaled(5, 2)]))) == 2


def test_layers_that_do_not_run_hand_on_what_they_are_given() -> None:
    layers = [Scaled(place, 2) for place in range(6)]
    entered: list[Block | None] = []
    shallow = ShallowLayers(dict.fromkeys(layers, "alike"), entered.append, entered.append)
    hidden = torch.ones(3, 2)
    for layer in layers:
        given = hidden
        hidden = layer(hidden, 1.0)
        assert (hidden is given) == (layer in layers[2:5])
    assert shallow.stands_for == {layers[1]: layers[2:5]}
    assert [None if one is None else one.times for one in entered] == [1, 4, None, None, None, 1]


def test_layers_that_are_given_other_arguments_are_not_alike() -> None:
    layers = [Scaled(place, 2) for place in range(6)]
    ShallowLayers(dict.fromkeys(layers, "alike"), lambda block: None, lambda block: None)
    hidden = torch.ones(3, 2)
    for layer in layers[:2]:
        hidden = layer(hidden, 1.0)
    with pytest.raises(LayersDifferError, match="layer 2 is given other arguments"):
        layers[2](hidden, 2.0)
