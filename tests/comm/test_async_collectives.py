"""Tests of collectives in flight: each ends where it is waited for, in both directions, also with unequal shards."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.comm.async_collectives import all_gather_v, all_to_all_v, reduce_scatter_v, start
from lightning_megatron.comm.collectives import Pending
from lightning_megatron.mesh import Axis, Mesh, Sizes
from tests.harness.threads import new_group, run_on_threads

# Rows that each rank (first) has for each other one (second).
GIVEN = [[1, 0, 2], [0, 0, 0], [3, 1, 2]]
TAKEN = [list(column) for column in zip(*GIVEN, strict=True)]
COUNTS = [2, 0, 3]


def axis_of(world: Any) -> Axis:
    return Mesh.build(Sizes(world=world.size(), tp=world.size()), world.rank(), new_group).tp


def test_what_is_computed_between_start_and_wait_runs_while_the_collective_is_in_flight_in_both_directions() -> None:
    order: list[str] = []

    class Noted(Pending):
        """Notes when it is waited for."""

        def wait(self) -> Tensor:
            order.append("wait")
            return super().wait()

    def collective(x: Tensor) -> Pending:
        order.append("start")
        return Noted(x * 3)

    class Meanwhile(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            order.append("meanwhile")
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            order.append("meanwhile")
            return grad * 2

    x = torch.ones(4, requires_grad=True)
    in_flight = start(x, collective, collective)
    meanwhile = Meanwhile.apply(x)
    out = in_flight.wait() + meanwhile
    assert order == ["start", "meanwhile", "wait"]
    order.clear()
    out.sum().backward()
    assert order == ["start", "meanwhile", "wait"]
    assert torch.equal(out, torch.full((4,), 5.0)) and torch.equal(x.grad, torch.full((4,), 5.0))
    with pytest.raises(AssertionError, match="waited for already"):
        in_flight.wait()


def test_tokens_of_an_all_to_all_v_and_their_gradients_go_to_the_ranks_they_are_for() -> None:
    def on_rank(world: Any) -> None:
        axis = axis_of(world)
        own, others = GIVEN[axis.rank], TAKEN[axis.rank]
        # 10 * sender + receiver
        x = torch.cat([torch.full((n, 2), 10.0 * axis.rank + to) for to, n in enumerate(own)]).requires_grad_()
        received = all_to_all_v(x, axis, own, others).wait()
        expected = torch.cat([torch.full((n, 2), 10.0 * source + axis.rank) for source, n in enumerate(others)])
        assert torch.equal(received, expected)
        received.backward(received.detach() + 0.5)
        assert x.grad is not None and torch.equal(x.grad, x.detach() + 0.5)

    run_on_threads(3, on_rank)


@pytest.mark.parametrize("size", [1, 3])
def test_all_gather_v_and_reduce_scatter_v_are_conjugate_with_unequal_shards(size: int) -> None:
    counts = COUNTS[:size]
    full, grads = torch.randn(sum(counts), 2, dtype=torch.float64), torch.randn(size, sum(counts), 2).double()

    def on_rank(world: Any) -> None:
        axis = axis_of(world)
        share = full.split(counts)[axis.rank].clone().requires_grad_()
        joined = all_gather_v(share, axis, counts).wait()
        assert torch.equal(joined, full)
        joined.backward(grads[axis.rank])
        torch.testing.assert_close(share.grad, grads.sum(0).split(counts)[axis.rank], rtol=0, atol=1e-12)
        part = grads[axis.rank].clone().requires_grad_()
        own = reduce_scatter_v(part, axis, counts).wait()
        torch.testing.assert_close(own, grads.sum(0).split(counts)[axis.rank], rtol=0, atol=1e-12)
        own.backward(share.detach())
        assert part.grad is not None and torch.equal(part.grad, full)

    run_on_threads(size, on_rank)


def test_all_to_all_v_over_an_axis_of_one_rank_gives_back_the_tensor_itself() -> None:
    x = torch.randn(3, 2)
    alone = Axis.alone(0)
    assert collectives.all_to_all_v(x, alone, [3], [3]) is x
