"""Tests of the mesh: its axes partition the world, all ranks make the same groups, its faults are told at once."""

import copy
import pickle
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.mesh import (
    DENSE,
    EXPERT,
    UNIONS,
    Axis,
    Mesh,
    Sizes,
    ambient,
    ambient_mesh,
)

NAMES = dict.fromkeys([*DENSE, *EXPERT, "world", *("+".join(union) for union in UNIONS)])


@st.composite
def many_sizes(draw: st.DrawFn) -> Sizes:
    """Sizes of up to some hundred ranks, with expert axes that fit the dense ones."""
    pp, dp, cp, tp = (draw(st.integers(1, 4)) for _ in range(4))
    world = pp * dp * cp * tp
    per_stage = world // pp
    ep = draw(st.sampled_from([n for n in range(1, per_stage + 1) if per_stage % n == 0]))
    etp = draw(st.sampled_from([n for n in range(1, per_stage // ep + 1) if (per_stage // ep) % n == 0]))
    return Sizes(world=world, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, sequence_parallel=draw(st.booleans()))


@given(many_sizes())
def test_each_axis_partitions_the_world_into_lines_of_its_size(sizes: Sizes) -> None:
    meshes = [Mesh.imagine(rank, sizes) for rank in range(sizes.world)]
    for name in NAMES:
        lines = {mesh.axis(name).ranks for mesh in meshes}
        assert sorted(rank for line in lines for rank in line) == list(range(sizes.world))
        for mesh in meshes:
            axis = mesh.axis(name)
            assert axis.size == len(axis.ranks) and axis.ranks[axis.rank] == mesh.global_rank


@given(many_sizes(), st.sampled_from([DENSE, EXPERT]))
def test_a_rank_is_told_apart_by_its_places_and_the_sizes_multiply_to_the_world(
    sizes: Sizes, names: tuple[str, ...]
) -> None:
    meshes = [Mesh.imagine(rank, sizes) for rank in range(sizes.world)]
    assert len({tuple(mesh.axis(name).rank for name in names) for mesh in meshes}) == sizes.world
    product = 1
    for name in names:
        product *= meshes[0].axis(name).size
    assert product == sizes.world


@given(many_sizes())
def test_the_ranks_of_a_line_differ_in_that_axis_alone(sizes: Sizes) -> None:
    meshes = [Mesh.imagine(rank, sizes) for rank in range(sizes.world)]
    for mesh in meshes:
        for names in (DENSE, EXPERT):
            for name in names:
                for place, rank in enumerate(mesh.axis(name).ranks):
                    other = meshes[rank]
                    assert other.axis(name).rank == place
                    assert all(other.axis(each).rank == mesh.axis(each).rank for each in names if each != name)


@given(many_sizes())
def test_a_union_joins_its_axes_with_the_first_of_them_slowest(sizes: Sizes) -> None:
    for rank in range(sizes.world):
        mesh = Mesh.imagine(rank, sizes)
        for union in UNIONS:
            place = 0
            for name in union:
                place = place * mesh.axis(name).size + mesh.axis(name).rank
            assert mesh.axis("+".join(union)).rank == place
            assert {*mesh.axis("+".join(union)).ranks} >= {*mesh.axis(union[0]).ranks}


@given(many_sizes())
def test_the_last_stage_sits_on_global_rank_0(sizes: Sizes) -> None:
    assert Mesh.imagine(0, sizes).pp.is_last
    assert Mesh.imagine(sizes.world - 1, sizes).pp.is_first
    # A block of neighbouring ranks is one stage.
    block = sizes.world // sizes.pp
    for rank in range(sizes.world):
        assert Mesh.imagine(rank, sizes).pp.rank == sizes.pp - 1 - rank // block


def test_tensor_parallel_neighbours_are_neighbours_of_the_world() -> None:
    sizes = Sizes(world=16, tp=4, pp=2, cp=2)
    assert Mesh.imagine(5, sizes).tp.ranks == (4, 5, 6, 7)
    assert Mesh.imagine(5, sizes).cp.ranks == (1, 5)
    assert Mesh.imagine(5, sizes).pp.ranks == (13, 5)
    assert Mesh.imagine(5, sizes).axis("pp+cp+tp").ranks == (8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)


def test_sp_is_tp_where_activations_are_cut_and_else_an_axis_of_one() -> None:
    cut = Mesh.imagine(3, Sizes(world=4, tp=2, sequence_parallel=True))
    assert (cut.sp.ranks, cut.sp.rank) == (cut.tp.ranks, cut.tp.rank) == ((2, 3), 1)
    whole = Mesh.imagine(3, Sizes(world=4, tp=2))
    assert (whole.sp.ranks, whole.sp.size, whole.sp.rank) == ((3,), 1, 0)


@given(many_sizes())
def test_groups_are_made_once_each_ascending_and_in_the_same_order_on_all_their_members(sizes: Sizes) -> None:
    made: list[list[tuple[int, ...]]] = []
    for rank in range(sizes.world):
        asked: list[tuple[int, ...]] = []
        Mesh.build(sizes, rank, lambda ranks, asked=asked: asked.append(ranks))  # type: ignore[misc]
        assert len(asked) == len(set(asked))
        assert all(list(ranks) == sorted(ranks) and len(ranks) > 1 and rank in ranks for ranks in asked)
        made.append(asked)
    for rank, asked in enumerate(made):
        for other in {other for ranks in asked for other in ranks}:
            shared = [ranks for ranks in asked if other in ranks]
            assert shared == [ranks for ranks in made[other] if rank in ranks]


@given(many_sizes())
def test_what_is_imagined_is_what_is_built(sizes: Sizes) -> None:
    for rank in {0, sizes.world // 2, sizes.world - 1}:
        assert Mesh.imagine(rank, sizes).axes == Mesh.build(sizes, rank, lambda ranks: None).axes


def test_a_single_device_is_alone_on_every_axis() -> None:
    assert all(axis.size == 1 and axis.group is None for axis in Mesh.single().axes.values())


def test_all_faults_of_the_sizes_are_told_at_once() -> None:
    with pytest.raises(ValueError) as raised:
        Mesh.imagine(0, Sizes(world=24, tp=5, ep=7))
    first, second = str(raised.value).splitlines()
    assert "world size (24)" in first and "(5)" in first and "use 20 or 25 processes" in first
    assert "expert" in second and "(7)" in second and "use 21 or 28 processes" in second
    with pytest.raises(ValueError) as raised:
        Mesh.imagine(0, Sizes(world=8, tp=0, cp=-1))
    assert str(raised.value).splitlines() == [
        "tensor_model_parallel_size (0) must be at least 1",
        "context_parallel_size (-1) must be at least 1",
    ]
    with pytest.raises(ValueError, match=r"use 8 processes"):
        Mesh.imagine(0, Sizes(world=4, tp=8))


def test_a_rank_outside_of_the_world_and_an_axis_off_the_mesh_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank \(4\) must be from 0 to world size - 1 \(3\)"):
        Mesh.imagine(4, Sizes(world=4))
    with pytest.raises(ValueError, match=r"'tpp' is not on the mesh; there are pp, dp"):
        Mesh.single().axis("tpp")


def test_a_copied_axis_keeps_its_group_and_a_pickled_one_its_arithmetic() -> None:
    axis = Axis("tp", 2, 1, (0, 1), group="a group")  # type: ignore[arg-type]
    assert copy.deepcopy(axis) is axis
    back = pickle.loads(pickle.dumps(axis))
    assert back == axis and back.group is None


def test_a_mesh_of_3072_ranks_is_imagined_in_moments() -> None:
    sizes = Sizes(world=3072, tp=8, pp=16, cp=2, ep=4, sequence_parallel=True)
    started_seconds = time.process_time()
    for rank in range(3072):
        Mesh.imagine(rank, sizes)
    # A fence against work that grows with the square of the world (minutes), not a measurement: it takes half a second.
    assert time.process_time() - started_seconds < 30


def test_the_ambient_mesh_is_that_of_one_device_unless_one_is_set() -> None:
    mesh = Mesh.imagine(1, Sizes(world=2))
    assert ambient_mesh().sizes == Sizes()
    with ambient(mesh):
        assert ambient_mesh() is mesh
    assert ambient_mesh().sizes == Sizes()
    with pytest.raises(KeyError), ambient(mesh):
        raise KeyError
    assert ambient_mesh().sizes == Sizes()


def test_groups_of_every_size_are_neighbours_on_the_line_of_replicas() -> None:
    sizes = Sizes(world=16, cp=2, tp=2, pp=2, context_groups=(1, 2, 4))
    for rank in range(16):
        mesh = Mesh.imagine(rank, sizes)
        line = mesh.axis("dp+cp").ranks
        for size in sizes.context_groups:
            axis = mesh.context_group(size)
            first = mesh.axis("dp+cp").rank // size * size
            assert axis.ranks == line[first : first + size]
            assert axis.ranks[axis.rank] == rank
    assert Sizes(world=6, context_groups=(4,)).faults() == [
        "a group of 4 ranks does not divide the 6 data x context parallel ranks"
    ]


def test_a_rank_alone_is_an_axis_of_one() -> None:
    alone = Axis.alone(5)
    assert (alone.name, alone.size, alone.rank, alone.ranks, alone.group) == ("alone", 1, 0, (5,), None)
    assert alone.is_first and alone.is_last
    assert Mesh.imagine(3, Sizes(world=4, tp=2)).sp == Axis.alone(3, "sp")


def test_experts_fold_over_all_axes_of_attention() -> None:
    sizes = Sizes(world=64, tp=4, cp=2, ep=64, etp=1)
    assert (sizes.dp, sizes.edp) == (8, 1)
    meshes = [Mesh.imagine(rank, sizes) for rank in range(64)]
    assert {mesh.axis("ep").ranks for mesh in meshes} == {tuple(range(64))}
    assert [mesh.axis("ep").rank for mesh in meshes] == list(range(64))
    assert {(mesh.tp.rank, mesh.cp.rank, mesh.dp.rank) for mesh in meshes} == {
        (tp, cp, dp) for tp in range(4) for cp in range(2) for dp in range(8)
    }
    assert {(mesh.axis("etp").size, mesh.axis("edp").size) for mesh in meshes} == {(1, 1)}
