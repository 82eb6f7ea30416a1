"""Collectives over a tree give what those over one group give, and no rank has more than a few peers."""

from typing import Any

import pytest
import torch

from lightning_megatron.comm import collectives
from lightning_megatron.comm.tree_axis import FAN_OUT, TreeAxis, tree_over
from lightning_megatron.mesh import Axis, Mesh, Sizes
from tests.harness.ranks import run_on_ranks
from tests.harness.threads import ThreadGroup, new_group, run_on_threads
from tests.pipeline.meshes import new_group as new_gloo_group


def union(sets: list[set[int]]) -> set[int]:
    return set().union(*sets)


def all_of(axis: Axis) -> list[Any]:
    """What every collective that a tree has gives on this rank."""
    rank, is_first = axis.rank, axis.is_first
    text = str(rank) * (1 if rank % 3 else 400)
    results: list[Any] = [int(collectives.all_reduce(torch.tensor(rank + 1), axis, op)) for op in ("sum", "max", "min")]
    results.append(collectives.broadcast_object(text if is_first else None, axis))
    results.append(collectives.gather_objects(text, axis))
    results.append(collectives.merge_objects({rank, rank // 2}, axis, union))
    results.append(collectives.gather_on_first(text, axis))
    results.append(collectives.scatter_objects([f"for {one}" for one in range(axis.size)] if is_first else [], axis))
    collectives.barrier(axis)
    return results


def wanted(rank: int, size: int) -> list[Any]:
    texts = [str(rank) * (1 if rank % 3 else 400) for rank in range(size)]
    numbers = set(range(size)) | {rank // 2 for rank in range(size)}
    return [
        *(sum(range(size + 1)), size, 1),
        *(texts[0], texts, numbers, texts if rank == 0 else [], f"for {rank}"),
    ]


def on_thread(world: ThreadGroup, fan_out: int) -> list[Any]:
    axis = Axis("world", world.size(), world.global_rank, world.ranks)
    return all_of(tree_over(axis, new_group, fan_out))  # type: ignore[arg-type]


@pytest.mark.parametrize("fan_out", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 14])
def test_collectives_over_a_tree_give_what_one_group_gives(size: int, fan_out: int) -> None:
    assert run_on_threads(size, on_thread, fan_out) == [wanted(rank, size) for rank in range(size)]


def on_rank() -> list[Any]:
    mesh = Mesh.build(Sizes(world=6, tp=2), torch.distributed.get_rank(), new_gloo_group)
    axis = tree_over(mesh.world, new_gloo_group, 2)
    assert isinstance(axis, TreeAxis)
    return all_of(axis)


def test_on_processes_all_is_the_same() -> None:
    assert run_on_ranks(6, on_rank) == [wanted(rank, 6) for rank in range(6)]


@pytest.mark.parametrize(("size", "fan_out"), [(2, 1), (9, 8), (10, 8), (73, 8), (1000, 3), (16_384, FAN_OUT)])
def test_members_of_a_family_make_its_group_at_one_turn_and_a_rank_has_few_peers(size: int, fan_out: int) -> None:
    world = tuple(range(size))
    made: list[list[tuple[int, ...]]] = [[] for _ in world]
    for rank in world:
        tree_over(Axis("world", size, rank, world), made[rank].append, fan_out)  # type: ignore[arg-type]
    assert len({len(groups) for groups in made}) == 1
    for rank, groups in enumerate(made):
        for turn, members in enumerate(groups):
            assert rank in members and all(
                made[other][turn] is members or made[other][turn] == members for other in members
            )
        assert sum(len(members) - 1 for members in groups) <= 2 * fan_out
