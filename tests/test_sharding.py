"""Tests of shards: the boxes of all ranks tile the parameter, and padding is left out of them."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.sharding import (
    Box,
    Initial,
    Shard,
    boxes_of_range,
    cut_length,
    shard_of,
    shard_parameter,
    sharded_parameters,
)

INITIAL = Initial(std=0.02)


def axes(size: int) -> list[Axis]:
    """The tensor-parallel axis as each of its ranks sees it."""
    return [Mesh.imagine(rank, Sizes(world=size, tp=size)).tp for rank in range(size)]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(0, 2), st.integers(1, 6), st.integers(1, 9))
def test_the_boxes_of_all_ranks_tile_the_parameter(shape: list[int], dim: int, size: int, multiple: int) -> None:
    dim = dim % len(shape)
    count = torch.zeros(shape, dtype=torch.int64)
    for axis in axes(size):
        parameter = shard_parameter(tuple(shape), initial=INITIAL, dim=dim, axis=axis, multiple=multiple)
        shard = shard_of(parameter)
        assert parameter.shape[dim] == shard.local_length == cut_length(shape[dim], axis, multiple)
        assert shard.local_length % multiple == 0
        assert tuple(shard.valid(parameter).shape) == shard.box.sizes
        part = count
        for each, (offset, extent) in enumerate(zip(shard.box.offsets, shard.box.sizes, strict=True)):
            part = part.narrow(each, offset, extent)
        part += 1
    assert count.eq(1).all()


@pytest.mark.parametrize(("length", "ep", "etp"), [(4, 2, 1), (4, 1, 2), (5, 2, 3), (2, 4, 4)])
def test_a_parameter_may_be_cut_along_its_first_dim_too(length: int, ep: int, etp: int) -> None:
    shape = (8, 3, length)
    count = torch.zeros(shape, dtype=torch.int64)
    for rank in range(ep * etp):
        mesh = Mesh.imagine(rank, Sizes(world=ep * etp, ep=ep, etp=etp))
        parameter = shard_parameter(shape, initial=INITIAL, dim=-1, axis=mesh.axis("etp"), leading=mesh.axis("ep"))
        shard = shard_of(parameter)
        assert tuple(parameter.shape) == (8 // ep, 3, -(-length // etp))
        assert tuple(shard.valid(parameter).shape) == shard.box.sizes
        part = count
        for dim, (offset, extent) in enumerate(zip(shard.box.offsets, shard.box.sizes, strict=True)):
            part = part.narrow(dim, offset, extent)
        part += 1
    assert count.eq(1).all()


def test_the_first_dim_is_cut_evenly_and_once() -> None:
    axis = axes(3)[0]
    with pytest.raises(ValueError, match=r"dim 0 of \(8, 2\) must be a multiple of tp \(3\)"):
        shard_parameter((8, 2), initial=INITIAL, leading=axis)
    with pytest.raises(ValueError, match="is cut over tp already; dim must be another one"):
        shard_parameter((9, 2), initial=INITIAL, dim=-2, axis=axis, leading=axis)


@given(st.integers(1, 1000), st.integers(1, 16), st.integers(1, 128))
def test_a_cut_length_is_the_least_multiple_that_holds_the_whole(length: int, size: int, multiple: int) -> None:
    local = cut_length(length, axes(size)[0], multiple)
    assert local % multiple == 0 and local * size >= length > (local - multiple) * size


def test_a_rank_may_hold_padding_alone() -> None:
    shards = [shard_of(shard_parameter((131, 4), initial=INITIAL, dim=0, axis=axis, multiple=128)) for axis in axes(4)]
    assert [shard.box.offsets for shard in shards] == [(0, 0), (128, 0), (131, 0), (131, 0)]
    assert [shard.box.sizes for shard in shards] == [(128, 4), (3, 4), (0, 4), (0, 4)]


def test_what_is_not_cut_is_whole_and_counts_on_the_first_of_its_replicas_alone() -> None:
    for axis in axes(3):
        parameter = shard_parameter((5, 2), initial=INITIAL, replicas=(axis,), partial=axis)
        shard = shard_of(parameter)
        assert shard.box == Box((0, 0), (5, 2)) and shard.valid(parameter) is parameter
        assert shard.is_counted == (axis.rank == 0)
        assert shard.partial == axis and shard.initial == INITIAL
        cut = shard_of(shard_parameter((6,), initial=INITIAL, dim=-1, axis=axis))
        assert cut.is_counted and cut.dim == 0


def test_a_plain_parameter_is_whole_on_every_rank() -> None:
    assert shard_of(nn.Parameter(torch.zeros(3, 2))) == Shard(global_shape=(3, 2))


def test_dim_and_axis_are_given_together() -> None:
    with pytest.raises(ValueError, match="give both or neither"):
        shard_parameter((4,), initial=INITIAL, dim=0)
    with pytest.raises(ValueError, match="give both or neither"):
        shard_parameter((4,), initial=INITIAL, axis=axes(2)[0])


def test_a_parameter_is_made_on_the_default_device_in_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            parameter = shard_parameter((4,), initial=INITIAL)
    finally:
        torch.set_default_dtype(torch.float32)
    assert parameter.is_meta and parameter.dtype == torch.float64 and parameter.requires_grad


def test_a_module_tells_its_sharded_parameters_and_a_copy_and_a_cast_keep_them() -> None:
    module = nn.Module()
    module.cut = shard_parameter((6,), initial=INITIAL, dim=0, axis=axes(2)[1])
    module.plain = nn.Parameter(torch.zeros(2))
    module.child = nn.Module()
    module.child.whole = shard_parameter((3,), initial=INITIAL)
    for each in (module, copy.deepcopy(module), copy.deepcopy(module).bfloat16()):
        told = {name: shard.global_shape for name, _, shard in sharded_parameters(each)}
        assert told == {"cut": (6,), "child.whole": (3,)}


@given(st.lists(st.integers(1, 6), max_size=4), st.integers(0, 1300), st.integers(0, 1300))
def test_boxes_of_a_range_hold_its_elements_in_order(shape: list[int], one: int, other: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    start, end = sorted(min(bound, whole.numel()) for bound in (one, other))
    boxes = list(boxes_of_range(tuple(shape), start, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    found = []
    for begin, box in boxes:
        part = whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        assert part.reshape(-1)[0] == begin and part.is_contiguous()
        found += part.reshape(-1).tolist()
    assert found == list(range(start, end))
