"""Tests of the collectives: right, out of place, in the order of the axis, and silent on an axis of one rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.comm.collectives import Pending
from lightning_megatron.mesh import Axis, Mesh, Sizes
from tests.harness.ranks import run_on_ranks
from tests.harness.threads import new_group, run_on_threads

SIZES = (2, 4)  # two CPU ranks have ways of their own


def values(rank: int, *shape: int) -> Tensor:
    """Whole numbers in float64, whose sums are exact; each rank has the largest and the least of some elements."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    return (count * (10 * rank + 15) + 17 * rank) % 97


def every_result(axis: Axis) -> dict[str, Tensor]:
    """What each collective gives on this rank."""
    results: dict[str, Tensor] = {}
    x = values(axis.rank, 8, 12)
    before = x.clone()
    for op in ("sum", "max", "min"):
        results[op] = collectives.all_reduce(x, axis, op)  # type: ignore[arg-type,call-overload]
    for dim in (0, 1, -1):
        results[f"gather {dim}"] = collectives.all_gather(x, axis, dim)
        results[f"scatter {dim}"] = collectives.reduce_scatter(x, axis, dim)
    for split, join in ((0, 1), (1, 0), (-1, -2)):
        results[f"all to all {split} {join}"] = collectives.all_to_all(x, axis, split, join)
    results["all to all of a transposed"] = collectives.all_to_all(x.t(), axis, 0, 1)
    results["sum of a transposed"] = collectives.all_reduce(x.t(), axis)
    results["gather of a transposed"] = collectives.all_gather(x.t(), axis)
    results["scatter of a transposed"] = collectives.reduce_scatter(x.t(), axis)
    pending = [
        collectives.all_reduce(x, axis, wait=False),
        collectives.all_gather(x, axis, 1, wait=False),
        collectives.reduce_scatter(x, axis, 1, wait=False),
        collectives.all_to_all(x, axis, 0, 1, wait=False),
    ]
    for name, each in zip(("sum later", "gather later", "scatter later", "all to all later"), pending, strict=True):
        results[name] = each.wait()
        assert each.wait() is results[name]  # waiting again does nothing
    assert x.equal(before)
    results["sum in place"] = x.clone()
    assert collectives.all_reduce_(results["sum in place"], axis) is results["sum in place"]
    for source in range(axis.size):
        results[f"from {source}"] = x.clone()
        assert collectives.broadcast_(results[f"from {source}"], axis, source) is results[f"from {source}"]
    collectives.barrier(axis)
    return results


def wanted_results(axis: Axis) -> dict[str, Tensor]:
    """The same without any message."""
    rank, size = axis.rank, axis.size
    x = [values(each, 8, 12) for each in range(size)]
    total = torch.stack(x).sum(0)
    wanted = {
        "sum": total,
        "max": torch.stack(x).amax(0),
        "min": torch.stack(x).amin(0),
        "sum of a transposed": total.t(),
        "gather of a transposed": torch.cat([each.t() for each in x]),
        "scatter of a transposed": total.t().chunk(size)[rank],
        "sum later": total,
        "gather later": torch.cat(x, 1),
        "scatter later": total.chunk(size, 1)[rank],
        "sum in place": total,
    }
    for dim in (0, 1, -1):
        wanted[f"gather {dim}"] = torch.cat(x, dim)
        wanted[f"scatter {dim}"] = total.chunk(size, dim)[rank]
    for split, join in ((0, 1), (1, 0), (-1, -2)):
        wanted[f"all to all {split} {join}"] = torch.cat([each.chunk(size, split)[rank] for each in x], join)
    wanted["all to all of a transposed"] = torch.cat([each.t().chunk(size)[rank] for each in x], 1)
    wanted["all to all later"] = wanted["all to all 0 1"]
    for source in range(size):
        wanted[f"from {source}"] = x[source]
    return wanted


def assert_right(results: dict[str, Tensor], axis: Axis) -> None:
    """Every result is the one wanted, and none is what the rank had to begin with."""
    rank, wanted = axis.rank, wanted_results(axis)
    assert results.keys() == wanted.keys()
    for name, result in results.items():
        assert result.equal(wanted[name]), name
        if name != f"from {rank}":
            assert not result.equal(values(rank, 8, 12)), name


@pytest.mark.parametrize("size", SIZES)
def test_each_collective_gives_what_no_message_could_on_threads(size: int) -> None:
    def on_rank(world: Any) -> None:
        tp = Mesh.build(Sizes(world=size, tp=size), world.rank(), new_group).tp
        assert_right(every_result(tp), tp)

    run_on_threads(size, on_rank)


def real_mesh(sizes: Sizes) -> Mesh:
    """A mesh of the processes that run; the default group stands for the world."""
    return Mesh.build(sizes, dist.get_rank(), lambda ranks: dist.new_group(list(ranks), use_local_synchronization=True))


def check_on_gloo(size: int) -> None:
    tp = real_mesh(Sizes(world=size, tp=size)).tp
    assert_right(every_result(tp), tp)
    # Stages run against the global ranks; what takes a rank on the axis must translate it.
    pp = real_mesh(Sizes(world=size, pp=size)).pp
    assert pp.rank == size - 1 - dist.get_rank()
    assert collectives.gather_objects(f"stage {pp.rank}", pp) == [f"stage {i}" for i in range(size)]
    # The last one's does not go into the one message of small objects.
    texts = [f"stage {i}" * (1 + 100 * (i == size - 1)) for i in range(size)]
    assert collectives.gather_objects(texts[pp.rank], pp) == texts
    for source in range(size):
        assert collectives.broadcast_object({"stage": pp.rank}, pp, source) == {"stage": source}
        assert collectives.broadcast_(torch.full((2,), pp.rank), pp, source).tolist() == [source, source]
    assert collectives.all_reduce(values(pp.rank, 3), pp).equal(sum(values(i, 3) for i in range(size)))
    collectives.barrier(pp)


@pytest.mark.parametrize("size", SIZES)
def test_each_collective_gives_the_same_on_real_ranks_and_counts_stages_along_the_axis(size: int) -> None:
    run_on_ranks(size, check_on_gloo, size)


@pytest.mark.parametrize("size", SIZES)
def test_shards_of_one_row_are_gathered_and_scattered_where_they_lie(size: int) -> None:
    rows = [values(each, 1, 8, 3) for each in range(size)]

    def on_rank(world: Any) -> None:
        tp = Mesh.build(Sizes(world=size, tp=size), world.rank(), new_group).tp
        pending = collectives.all_gather(rows[tp.rank], tp, 1, wait=False)
        landed, gathered = pending.output, pending.wait()
        assert gathered is landed and gathered.equal(torch.cat(rows, 1)) and not gathered._is_view()
        # Shards of two rows are copied into their places.
        pending = collectives.all_gather(torch.zeros(2, 8, 3), tp, 1, wait=False)
        assert pending.output is not pending.wait()
        scattered = collectives.reduce_scatter(rows[tp.rank], tp, 1)
        assert scattered.equal(torch.stack(rows).sum(0).chunk(size, 1)[tp.rank])

    run_on_threads(size, on_rank)


def check_sums_agree() -> None:
    axis = real_mesh(Sizes(world=2, tp=2)).tp
    generator = torch.Generator().manual_seed(axis.rank)
    # The second is too large to be swapped.
    for elements in (1000, 1 << 20):
        for dtype in (torch.float32, torch.bfloat16):
            own = torch.randn(elements, generator=generator).to(dtype)
            both = collectives.all_gather(own, axis).chunk(2)
            summed = collectives.all_reduce(own, axis)
            assert summed.equal(both[0] + both[1])
            assert summed.equal(collectives.all_gather(collectives.reduce_scatter(own, axis), axis))
    assert collectives.all_reduce(torch.tensor(axis.rank + 1.0), axis).equal(torch.tensor(3.0))


def test_two_ranks_get_the_same_bits_of_a_sum_of_any_size() -> None:
    run_on_ranks(2, check_sums_agree)


def test_an_axis_that_runs_backwards_cannot_join_shards_in_its_order() -> None:
    pp = Mesh.imagine(0, Sizes(world=2, pp=2)).pp
    with pytest.raises(AssertionError, match="does not ascend"):
        collectives.all_gather(torch.zeros(2), pp)
    with pytest.raises(AssertionError, match="does not ascend"):
        collectives.reduce_scatter(torch.zeros(2), pp)


def test_what_does_not_divide_is_refused() -> None:
    tp = Mesh.imagine(0, Sizes(world=2, tp=2)).tp
    for collective in (collectives.reduce_scatter, collectives.shard_slice):
        with pytest.raises(AssertionError, match=r"dim 0 of \(3,\) does not divide by tp \(2\)"):
            collective(torch.zeros(3), tp)


def test_the_slices_of_all_ranks_join_to_the_whole_without_a_copy() -> None:
    x = torch.arange(24).view(4, 6)
    axes = [Mesh.imagine(rank, Sizes(world=2, tp=2)).tp for rank in range(2)]
    for dim in (0, 1, -1):
        slices = [collectives.shard_slice(x, axis, dim) for axis in axes]
        assert torch.cat(slices, dim).equal(x)
        assert all(each.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for each in slices)


def test_an_axis_of_one_rank_needs_no_group_and_gives_back_what_it_got() -> None:
    one = Mesh.single().tp
    x = torch.randn(3, 5)
    for collective in (collectives.all_reduce, collectives.all_reduce_):
        assert collective(x, one) is x and collective(x, one, wait=False).wait() is x
    for along in (collectives.all_gather, collectives.reduce_scatter):
        assert along(x, one, 1) is x and along(x, one, 1, wait=False).wait() is x
    assert collectives.broadcast_(x, one) is x and collectives.shard_slice(x, one).equal(x)
    value = object()
    assert collectives.broadcast_object(value, one) is value and collectives.gather_objects(value, one) == [value]
    collectives.barrier(one)


def test_a_pending_result_is_finished_once() -> None:
    pending = Pending(torch.zeros(1), finish=lambda landed: landed + 1)
    assert pending.wait().item() == 1.0 and pending.wait().item() == 1.0


def in_place(axis: Axis) -> dict[str, Tensor]:
    """What the flat collectives leave on this rank; the answers are views of what they were given, at its own part."""
    found: dict[str, Tensor] = {}
    for name, waits in (("now", True), ("later", False)):
        x = values(axis.rank, 24)
        own = collectives.reduce_scatter_(x, axis) if waits else collectives.reduce_scatter_(x, axis, wait=False).wait()
        assert own.data_ptr() == collectives.shard_slice(x, axis).data_ptr()
        found[f"scatter {name}"] = own.clone()
        y = torch.full((24,), -1.0, dtype=torch.float64)
        collectives.shard_slice(y, axis).copy_(own)
        full = collectives.all_gather_(y, axis) if waits else collectives.all_gather_(y, axis, wait=False).wait()
        assert full is y
        found[f"gather {name}"] = full
    return found


def in_place_on_ranks() -> tuple[int, dict[str, Tensor]]:
    axis = Axis("tp", dist.get_world_size(), dist.get_rank(), tuple(range(dist.get_world_size())), dist.group.WORLD)
    return axis.rank, in_place(axis)


@pytest.mark.parametrize("size", [2, 3])
def test_flat_collectives_scatter_and_gather_in_place(size: int) -> None:
    total = torch.stack([values(rank, 24) for rank in range(size)]).sum(0)
    for rank, found in run_on_ranks(size, in_place_on_ranks):
        for when in ("now", "later"):
            assert torch.equal(found[f"scatter {when}"], total.chunk(size)[rank])
            assert torch.equal(found[f"gather {when}"], total)


def test_flat_collectives_of_one_rank_give_back_what_they_got() -> None:
    x, alone = values(0, 24), Mesh.single().tp
    assert collectives.reduce_scatter_(x, alone) is x and collectives.all_gather_(x, alone, wait=False).wait() is x
