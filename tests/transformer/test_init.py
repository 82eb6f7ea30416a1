"""Tests of the initial values: they depend on seed, name and position, not on the layout."""

import math

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import sharding
from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.sharding import (
    Initial,
    deferring,
    is_deferred,
    materialize,
    shard_of,
    shard_parameter,
    write_elements,
)
from lightning_megatron.transformer.init import initialise

V, H, STD, MEAN = 131, 24, 0.02, 0.5


class Weights(nn.Module):
    """Parameters cut along either dim, with and without padding, and some that are constant."""

    def __init__(self, tp: Axis, multiple: int) -> None:
        super().__init__()
        self.rows = shard_parameter((V, H), initial=Initial(std=STD), dim=0, axis=tp, multiple=multiple)
        self.columns = shard_parameter((7, V), initial=Initial(std=STD, mean=MEAN), dim=1, axis=tp, multiple=multiple)
        self.middle = shard_parameter((2, 8, H), initial=Initial(std=STD), dim=1, axis=tp)
        self.whole = shard_parameter((V, H), initial=Initial(std=STD), replicas=(tp,))
        self.scale = shard_parameter((H,), initial=Initial(mean=1.0), replicas=(tp,))
        self.bias = shard_parameter((V,), initial=Initial(), dim=0, axis=tp, multiple=multiple)


def built(tp: Axis, multiple: int = 1, seed: int = 0, prefix: str = "") -> Weights:
    """The weights of one rank; what memory held before must not show."""
    weights = Weights(tp, multiple)
    for parameter in weights.parameters():
        nn.init.constant_(parameter, math.nan)
    initialise(weights, seed, prefix)
    return weights


def part_of(whole: Tensor, local: Tensor) -> Tensor:
    """The slice of the unsplit parameter that the local one is."""
    box = shard_of(local).box
    return whole[tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("multiple", [1, 128])
def test_each_rank_holds_the_slice_of_what_one_device_holds(size: int, multiple: int) -> None:
    single = built(Mesh.single().tp)
    for rank in range(size):
        local = built(Mesh.imagine(rank, Sizes(world=size, tp=size)).tp, multiple)
        for name, whole in single.named_parameters():
            parameter = local.get_parameter(name)
            valid = shard_of(parameter).valid(parameter)
            assert valid.equal(part_of(whole, parameter))
            assert parameter.isfinite().all()
            assert parameter.count_nonzero() == valid.count_nonzero()  # the padding is zero


def test_ranks_hold_different_numbers() -> None:
    first, second = (built(Mesh.imagine(rank, Sizes(world=2, tp=2)).tp) for rank in range(2))
    for name in ("rows", "columns", "middle"):
        assert not (first.get_parameter(name) == second.get_parameter(name)).any()
    assert first.whole.equal(second.whole)


def test_mean_and_deviation_are_those_of_the_shard() -> None:
    weights = built(Mesh.single().tp)
    for parameter, mean in ((weights.rows, 0.0), (weights.columns, MEAN), (weights.whole, 0.0)):
        num = parameter.numel()
        assert abs(parameter.mean() - mean) < 4 * STD / math.sqrt(num)
        assert abs(parameter.std() / STD - 1) < 4 / math.sqrt(2 * num)
    assert weights.scale.eq(1.0).all() and not weights.bias.any()


def test_names_and_seeds_tell_the_numbers_apart_and_nothing_else_does() -> None:
    tp = Mesh.single().tp
    weights = built(tp)
    assert not (weights.rows == weights.whole).any()
    assert not (weights.rows == built(tp, seed=1).rows).any()
    assert not (weights.rows == built(tp, prefix="layers.1.").rows).any()
    torch.manual_seed(1)
    torch.rand(5)
    assert weights.rows.equal(built(tp).rows)
    model = nn.Module()
    model.part = Weights(tp, 1)
    initialise(model, 0)
    assert model.part.rows.equal(built(tp, prefix="part.").rows)


def test_a_dtype_rounds_the_same_numbers() -> None:
    tp = Mesh.single().tp
    double = Weights(tp, 1).double()
    initialise(double, 0)
    assert built(tp).rows.equal(double.rows.float())


def test_on_the_meta_device_nothing_is_drawn() -> None:
    with torch.device("meta"):
        weights = Weights(Mesh.imagine(3, Sizes(world=4, tp=4)).tp, 128)
    initialise(weights, 0)
    assert all(parameter.is_meta for parameter in weights.parameters())


@pytest.mark.parametrize("multiple", [1, 128])
def test_any_part_of_a_parameter_without_values_is_drawn_as_the_whole_is(
    multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "_NUM_WRITTEN", 100)
    tp = Mesh.imagine(1, Sizes(world=2, tp=2)).tp
    whole = built(tp, multiple)
    with deferring():
        waiting = Weights(tp, multiple)
        initialise(waiting, 0)
    for name, parameter in waiting.named_parameters():
        values, size = whole.get_parameter(name).detach(), parameter.numel()
        for start, end in ((0, size), (5, 5), (size // 3, size - 1)):
            out = torch.full((end - start,), math.nan)
            write_elements(parameter, start, end, out)
            assert out.equal(values.view(-1)[start:end])
        assert is_deferred(parameter)
        materialize(parameter)
        assert parameter.equal(values) and shard_of(parameter) == shard_of(whole.get_parameter(name))
