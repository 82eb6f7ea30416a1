"""Tests of ranks as threads: they compute what real ranks compute, and refuse what NCCL would hang on."""

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import run_on_ranks
from tests.harness.threads import (
    DeadlockError,
    MismatchError,
    RankEnded,
    ThreadGroup,
    new_group,
    run_on_threads,
)

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# What a deadlock says that was seen and not timed: one found by the limit says how long it waited.
AT_ONCE = "^deadlock: no rank can go on\n"


def every_collective(group: Any, rank: int, size: int) -> dict[str, torch.Tensor]:
    """One result of each function, with a group of threads or of processes."""
    mine = torch.arange(6.0).view(3, 2) + 10 * rank
    results = {}
    for name in ("SUM", "MAX", "MIN", "AVG", "PRODUCT"):
        results[name] = mine.clone()
        dist.all_reduce(results[name], op=getattr(dist.ReduceOp, name), group=group)
    results["gathered"] = torch.empty(3 * size, 2)
    work = all_gather_single(results["gathered"], mine, group=group, async_op=True)
    work.wait()
    pieces = [torch.empty(3, 2) for _ in range(size)]
    dist.all_gather(pieces, mine, group=group)
    results["gathered in a list"] = torch.stack(pieces)
    whole = torch.arange(4.0 * size).view(2 * size, 2) * (rank + 1)
    results["scattered"] = torch.empty(2, 2)
    reduce_scatter_single(results["scattered"], whole, group=group)
    results["scattered mean"] = torch.empty(2, 2)
    reduce_scatter_single(results["scattered mean"], whole, op=dist.ReduceOp.AVG, group=group)
    results["scattered list"] = torch.empty(2, 2)
    dist.reduce_scatter(results["scattered list"], list(whole.chunk(size)), group=group)
    results["broadcast"] = mine.clone()
    dist.broadcast(results["broadcast"], group_src=size - 1, group=group)
    results["exchanged"] = torch.empty(2 * size, 2)
    dist.all_to_all_single(results["exchanged"], whole, group=group)
    gives = [(rank + target) % 3 for target in range(size)]
    takes = [(source + rank) % 3 for source in range(size)]
    results["exchanged unevenly"] = torch.empty(sum(takes), 2)
    dist.all_to_all_single(
        results["exchanged unevenly"], torch.full((sum(gives), 2), float(rank)), takes, gives, group=group
    )
    ops = [
        dist.P2POp(dist.isend, mine, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(
            dist.irecv, results.setdefault("ring", torch.empty(3, 2)), group=group, group_peer=(rank - 1) % size
        ),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    results["one way"] = mine.clone()
    if rank == 0:
        dist.send(mine, group_dst=1, group=group)
    elif rank == 1:
        dist.recv(results["one way"], group_src=0, group=group)
    dist.barrier(group=group)
    return results


def on_processes() -> dict[str, torch.Tensor]:
    return every_collective(dist.group.WORLD, dist.get_rank(), dist.get_world_size())


def test_threads_compute_what_gloo_computes() -> None:
    from_threads = run_on_threads(3, lambda world: every_collective(world, world.rank(), world.size()))
    from_gloo = run_on_ranks(3, on_processes)
    for thread, process in zip(from_threads, from_gloo, strict=True):
        assert thread.keys() == process.keys()
        for name in thread:
            torch.testing.assert_close(thread[name], process[name], rtol=0, atol=0, msg=name)


def test_subgroups_talk_among_themselves() -> None:
    def step(world: ThreadGroup) -> tuple[float, float]:
        rank = world.rank()
        column = [new_group([0, 2]), new_group([1, 3])][rank % 2]
        row = world.subgroup([0, 1] if rank < 2 else [2, 3])
        assert column is not None
        assert row is not None
        totals = torch.tensor([float(rank), float(rank)])
        dist.all_reduce(totals[:1], group=column)
        dist.all_reduce(totals[1:], group=row)
        assert dist.get_process_group_ranks(column) == list(column.ranks)
        assert dist.get_world_size(column) == 2
        return totals[0].item(), totals[1].item()

    assert run_on_threads(4, step) == [(2, 1), (4, 1), (2, 5), (4, 5)]


def test_groups_made_in_different_order_are_an_error() -> None:
    def step(world: ThreadGroup) -> None:
        for ranks in ([0, 1], [0, 1, 2])[:: 1 if world.rank() else -1]:
            new_group(ranks)

    with pytest.raises(MismatchError, match=r"in the same order:\n  rank 0: .*\n  rank 1: "):
        run_on_threads(3, step)


def test_groups_that_only_their_members_make_are_fine() -> None:
    def step(world: ThreadGroup) -> None:
        new_group([0, 1] if world.rank() < 2 else [2, 3])
        new_group([0, 2] if world.rank() % 2 == 0 else [1, 3])

    run_on_threads(4, step)


def test_a_result_lands_when_it_is_waited_for_and_not_before() -> None:
    def step(world: ThreadGroup) -> tuple[float, float]:
        total = torch.ones(1)
        work = dist.all_reduce(total, group=world, async_op=True)
        dist.barrier(group=world)
        early = total.item()
        work.wait()
        return early, total.item()

    assert run_on_threads(2, step) == [(1, 2), (1, 2)]


def test_a_work_that_nobody_waits_for_is_an_error() -> None:
    def step(world: ThreadGroup) -> None:
        dist.all_reduce(torch.ones(1), group=world, async_op=True)

    with pytest.raises(RuntimeError, match="never waited for: all_reduce"):
        run_on_threads(2, step)


def crossed(group: Any, rank: int) -> float:
    """Both ranks send, then receive, without waiting between."""
    sent, received = torch.tensor([float(rank)]), torch.empty(1)
    works = [dist.isend(sent, group_dst=1 - rank, group=group), dist.irecv(received, group_src=1 - rank, group=group)]
    for work in works:
        assert work is not None
        work.wait()
    return received.item()


def crossed_on_processes() -> float:
    return crossed(dist.group.WORLD, dist.get_rank())


def test_an_order_that_gloo_forgives_and_nccl_does_not_is_a_deadlock_at_once() -> None:
    assert run_on_ranks(2, crossed_on_processes) == [1.0, 0.0]
    with pytest.raises(DeadlockError, match=AT_ONCE) as deadlock:
        run_on_threads(2, lambda world: crossed(world, world.rank()), limit_seconds=5)
    assert "rank 0 waits for send of float32[1] to rank 1" in str(deadlock.value)
    assert "rank 1 waits for send of float32[1] to rank 0" in str(deadlock.value)


def test_what_waits_behind_something_else_says_so() -> None:
    def step(world: ThreadGroup) -> None:
        peer = 1 - world.rank()
        first = dist.isend(torch.zeros(1), group_dst=peer, group=world)
        dist.recv(torch.zeros(1), group_src=peer, group=world)
        assert first is not None
        first.wait()

    with pytest.raises(DeadlockError, match=r"recv of .* from rank 1, behind its send of"):
        run_on_threads(2, step)


def test_a_blocking_send_ends_only_when_it_is_received() -> None:
    events: list[str] = []

    def step(world: ThreadGroup) -> None:
        if world.rank() == 0:
            dist.send(torch.zeros(1), group_dst=1, group=world)
            events.append("sent")
        else:
            time.sleep(0.2)
            events.append("receives")
            dist.recv(torch.zeros(1), group_src=0, group=world)

    run_on_threads(2, step)
    assert events == ["receives", "sent"]


def test_messages_of_one_pair_arrive_in_order() -> None:
    def step(world: ThreadGroup) -> list[float]:
        if world.rank() == 0:
            works = [dist.isend(torch.tensor([float(i)]), group_dst=1, group=world) for i in range(4)]
            for work in works:
                work.wait()
            return []
        buffers = [torch.empty(1) for _ in range(4)]
        works = [dist.irecv(buffer, group_src=0, group=world) for buffer in buffers]
        for work in reversed(works):
            work.wait()
        return [buffer.item() for buffer in buffers]

    assert run_on_threads(2, step)[1] == [0, 1, 2, 3]


@pytest.mark.parametrize("received", [torch.empty(3), torch.empty(2, dtype=torch.float64), torch.empty(1, 2)])
def test_a_message_of_another_shape_or_dtype_is_an_error_on_both_ends(received: torch.Tensor) -> None:
    seen: list[int] = []

    def step(world: ThreadGroup) -> None:
        try:
            if world.rank() == 0:
                dist.send(torch.zeros(2), group_dst=1, group=world)
            else:
                dist.recv(received, group_src=0, group=world)
        except MismatchError:
            seen.append(world.rank())
            raise

    with pytest.raises(MismatchError, match=r"rank 0 sends float32\[2\] to rank 1, which receives"):
        run_on_threads(2, step)
    assert sorted(seen) == [0, 1]


def other_op(group: ThreadGroup) -> None:
    op = dist.ReduceOp.SUM if group.rank() == 0 else dist.ReduceOp.MAX
    dist.all_reduce(torch.zeros(2), op=op, group=group)


def other_shape(group: ThreadGroup) -> None:
    dist.all_reduce(torch.zeros(2 + group.rank()), group=group)


def other_kind(group: ThreadGroup) -> None:
    if group.rank() == 0:
        dist.barrier(group=group)
    else:
        dist.all_reduce(torch.zeros(2), group=group)


def other_root(group: ThreadGroup) -> None:
    dist.broadcast(torch.zeros(2), group_src=group.rank(), group=group)


def other_splits(group: ThreadGroup) -> None:
    splits = [1, 1] if group.rank() == 0 else [0, 2]
    dist.all_to_all_single(torch.zeros(2), torch.zeros(2), splits, splits, group=group)


def with_a_tag(group: ThreadGroup) -> None:
    peer = 1 - group.rank()
    if group.rank() == 0:
        dist.send(torch.zeros(1), group_dst=peer, tag=1, group=group)
    else:
        dist.recv(torch.zeros(1), group_src=peer, tag=1, group=group)


def transposed(group: ThreadGroup) -> None:
    dist.all_reduce(torch.zeros(2, 3).t(), group=group)


def from_anyone(group: ThreadGroup) -> None:
    group.recv_anysource([torch.zeros(1)], 0)


@pytest.mark.parametrize(
    "step", [other_op, other_shape, other_kind, other_root, other_splits, with_a_tag, transposed, from_anyone]
)
def test_ranks_that_disagree_are_refused(step: Any) -> None:
    with pytest.raises(MismatchError):
        run_on_threads(2, step)


def test_a_failure_ends_the_others_with_that_as_the_cause() -> None:
    causes: list[BaseException | None] = []

    def step(world: ThreadGroup) -> None:
        if world.rank() == 1:
            raise KeyError("lost")
        try:
            dist.barrier(group=world)
        except RankEnded as ended:
            causes.append(ended.__cause__)
            raise

    with pytest.raises(KeyError, match="lost") as failure:
        run_on_threads(3, step)
    assert failure.value.__notes__ == ["raised on rank 1 of 3"]
    assert causes == [failure.value, failure.value]


def test_a_rank_that_waits_for_one_that_has_returned_is_a_deadlock() -> None:
    def step(world: ThreadGroup) -> None:
        if world.rank() == 0:
            dist.barrier(group=world)

    with pytest.raises(DeadlockError, match=f"{AT_ONCE}.*barrier.*\n.*rank 1 has returned"):
        run_on_threads(2, step, limit_seconds=5)


def test_a_circle_of_three_and_a_rank_that_waits_outside_of_it_are_a_deadlock_at_once() -> None:
    def step(world: ThreadGroup) -> None:
        if world.rank() == 3:
            dist.recv(torch.zeros(1), group_src=0, group=world)
        else:
            dist.recv(torch.zeros(1), group_src=(world.rank() + 1) % 3, group=world)

    with pytest.raises(DeadlockError, match=AT_ONCE) as deadlock:
        run_on_threads(4, step, limit_seconds=5)
    for rank, peer in enumerate((1, 2, 0, 0)):
        assert f"rank {rank} waits for recv of float32[1] from rank {peer}" in str(deadlock.value)


def test_a_wait_for_a_rank_that_computes_ends_at_the_limit() -> None:
    ended = threading.Event()

    def step(world: ThreadGroup) -> None:
        if world.rank() == 1:
            assert ended.wait(60)
            return
        try:
            dist.barrier(group=world)
        finally:
            ended.set()

    with pytest.raises(DeadlockError, match=r"waited for 0\.1 s\n.*barrier.*\n.*rank 1 is computing"):
        run_on_threads(2, step, limit_seconds=0.1)


def test_gradients_flow_through_functions_that_talk() -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, group: ThreadGroup) -> torch.Tensor:
            ctx.group = group
            total = x.clone()
            dist.all_reduce(total, group=group)
            return total

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=ctx.group)
            return grad, None

    def step(world: ThreadGroup) -> torch.Tensor:
        x = torch.full((2,), float(world.rank()), requires_grad=True)
        (Sum.apply(x, world) * (world.rank() + 1)).sum().backward()
        assert x.grad is not None
        return x.grad

    assert [grad.tolist() for grad in run_on_threads(3, step)] == [[6, 6]] * 3


def test_nothing_stays_registered_after_a_run() -> None:
    before = len(dist.distributed_c10d._world.pg_group_ranks)
    run_on_threads(2, lambda world: dist.barrier(group=world))
    assert len(dist.distributed_c10d._world.pg_group_ranks) == before
    assert not dist.is_initialized()
