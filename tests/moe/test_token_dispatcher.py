"""Tests of dispatch and combine: on every layout the experts give what a loop over them gives on one device."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.comm.collectives import Pending
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.moe import token_dispatcher
from lightning_megatron.moe.token_dispatcher import (
    AllGatherTokenDispatcher,
    AllToAllTokenDispatcher,
    SharedTokenDispatcher,
    TokenDispatcher,
    moe_forward,
)
from lightning_megatron.transformer import recompute
from tests.harness.ranks import run_on_ranks
from tests.moe.plain import (
    BITE,
    LAYOUTS,
    E,
    K,
    Plain,
    assert_expert_gradients,
    assert_same,
    dispatcher_of,
    experts_of,
    on_every_layout,
    on_mesh,
    own,
    with_either_dispatcher,
)

Make = Callable[..., TokenDispatcher]


def check(
    plain: Plain, out: Tensor, make: Make, mesh: Mesh, capacity: int | None = None, num_rows: int | None = None
) -> None:
    """Output and every gradient on this rank equal those of the plain experts, of the choices that are given."""
    experts = experts_of(plain, mesh)
    hidden, weights = own(plain.hidden, mesh).requires_grad_(), own(plain.weights, mesh).requires_grad_()
    mixed, _ = moe_forward(
        hidden,
        own(plain.experts, mesh),
        weights,
        dispatcher=dispatcher_of(make, mesh),
        experts=experts,
        capacity=capacity,
        num_rows=num_rows,
    )
    assert_same(mixed, own(out, mesh))
    mixed.backward(own(plain.out_grad, mesh))
    for leaf, unsharded in ((hidden, plain.hidden), (weights, plain.weights)):
        assert leaf.grad is not None and unsharded.grad is not None
        assert_same(leaf.grad, own(unsharded.grad, mesh))
    assert_expert_gradients(experts, plain)


@on_every_layout
@with_either_dispatcher
def test_experts_on_any_layout_equal_a_loop_over_them(world_size: int, ep: int, etp: int, make: Make) -> None:
    plain = Plain(5 * world_size)
    out = plain.run()
    on_mesh(world_size, ep, etp, lambda mesh: check(plain, out, make, mesh))


@with_either_dispatcher
@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
@pytest.mark.parametrize("num_chosen", [1, 3])
def test_every_activation_and_number_of_choices_equals_the_loop(make: Make, activation: Any, num_chosen: int) -> None:
    plain = Plain(20, activation=activation, num_chosen=num_chosen)
    out = plain.run()
    on_mesh(4, 2, 2, lambda mesh: check(plain, out, make, mesh))


@on_every_layout
@with_either_dispatcher
def test_experts_and_ranks_without_a_token_have_zero_gradients(world_size: int, ep: int, etp: int, make: Make) -> None:
    plain = Plain(8 * world_size)
    # All of a rank's experts empty, single ones among others, tokens with one choice or none, a rank with none at all.
    plain.experts[(plain.experts < E // 4) | (plain.experts == E - 2)] = -1
    plain.experts[: 8 if world_size > 1 else 4] = -1
    out = plain.run()
    assert (out.abs().sum(1) == 0).any() and (plain.experts >= 0).any()

    def on_rank(mesh: Mesh) -> None:
        check(plain, out, make, mesh)
        experts = experts_of(plain, mesh)
        nothing = torch.full((8, K), -1)
        hidden = own(plain.hidden, mesh)
        mixed, _ = moe_forward(
            hidden,
            nothing,
            own(plain.weights, mesh),
            dispatcher=dispatcher_of(make, mesh),
            experts=experts,
        )
        mixed.sum().backward()
        assert mixed.count_nonzero() == 0 and mixed.shape == hidden.shape
        for parameter in experts.parameters():
            assert parameter.grad is not None and parameter.grad.count_nonzero() == 0

    on_mesh(world_size, ep, etp, on_rank)


@pytest.mark.parametrize(("ep", "etp"), [(4, 1), (2, 2), (1, 4)])
def test_ranks_may_have_different_numbers_of_tokens_under_all_to_all(ep: int, etp: int) -> None:
    counts = [3, 0, 7, 1]
    plain = Plain(sum(counts))
    out = plain.run()

    def on_rank(mesh: Mesh) -> None:
        def mine(unsharded: Tensor) -> Tensor:
            return unsharded.detach().split(counts)[mesh.global_rank].clone()

        experts = experts_of(plain, mesh)
        hidden, weights = mine(plain.hidden).requires_grad_(), mine(plain.weights).requires_grad_()
        mixed, _ = moe_forward(
            hidden,
            mine(plain.experts),
            weights,
            dispatcher=dispatcher_of(AllToAllTokenDispatcher, mesh),
            experts=experts,
        )
        mixed.backward(mine(plain.out_grad))
        assert_same(mixed, mine(out))
        for leaf, unsharded in ((hidden, plain.hidden), (weights, plain.weights)):
            assert leaf.grad is not None and unsharded.grad is not None
            assert_same(leaf.grad, mine(unsharded.grad))
        assert_expert_gradients(experts, plain)

    on_mesh(4, ep, etp, on_rank)


@on_every_layout
@with_either_dispatcher
@pytest.mark.parametrize("capacity", [None, 5])
def test_there_and_back_is_each_token_times_its_choices(
    world_size: int, ep: int, etp: int, make: Make, capacity: int | None
) -> None:
    plain = Plain(5 * world_size)
    plain.experts[::3, 0] = -1
    plain.experts[1] = -1

    def on_rank(mesh: Mesh) -> None:
        hidden, experts = own(plain.hidden, mesh).requires_grad_(), own(plain.experts, mesh)
        work = dispatcher_of(make, mesh).dispatch(hidden, experts, own(plain.weights, mesh), capacity)
        arrived = work.wait()
        assert arrived.groups.num_rows == len(arrived.rows_RH) == len(arrived.probs_R)
        assert arrived.groups.sizes_L.tolist() == list(arrived.groups.sizes)
        # On each rank of etp they make a part of a sum.
        combined = work.combine(arrived.rows_RH / etp)
        times = (experts >= 0).sum(1, keepdim=True)
        assert_same(combined, hidden.detach() * times)
        combined.backward(torch.ones_like(combined))
        assert hidden.grad is not None
        assert_same(hidden.grad, torch.ones_like(combined) * times)

    on_mesh(world_size, ep, etp, on_rank)


@pytest.mark.parametrize(("world_size", "ep", "etp"), LAYOUTS)
@pytest.mark.parametrize("capacity", [None, 6])
def test_both_dispatchers_hand_over_the_same_rows_in_the_same_order(
    world_size: int, ep: int, etp: int, capacity: int | None
) -> None:
    plain = Plain(6 * world_size)

    def on_rank(mesh: Mesh) -> None:
        def arrived(make: Make) -> list[Tensor]:
            given = (own(each, mesh) for each in (plain.hidden, plain.experts, plain.weights))
            rows, weights, groups = dispatcher_of(make, mesh).dispatch(*given, capacity).wait()
            parts = [
                torch.cat([row, weight[:, None]], dim=1)
                for row, weight in zip(rows.split(groups.sizes), weights.split(groups.sizes), strict=True)
            ]
            # Padding follows each rank's rows, or those of all ranks.
            return [part[part[:, -1] != 0] for part in parts]

        for sent, gathered in zip(arrived(AllToAllTokenDispatcher), arrived(AllGatherTokenDispatcher), strict=True):
            assert torch.equal(sent, gathered)

    on_mesh(world_size, ep, etp, on_rank)


@on_every_layout
@with_either_dispatcher
@pytest.mark.parametrize("num_rows", [5, 8])
def test_experts_of_rows_that_are_filled_up_equal_the_loop(
    world_size: int, ep: int, etp: int, make: Make, num_rows: int
) -> None:
    plain = Plain(8 * world_size)
    # Of each rank no expert is chosen by more than five tokens, by some experts and ranks not at all.
    for rank in range(world_size):
        own_TK = plain.experts[8 * rank : 8 * rank + 8]
        for expert in range(E):
            places = (own_TK == expert).nonzero()
            own_TK[tuple(places[5:].T)] = -1
    plain.experts[:8, 0] = -1
    out = plain.run()
    on_mesh(world_size, ep, etp, lambda mesh: check(plain, out, make, mesh, num_rows))


@with_either_dispatcher
@pytest.mark.parametrize(("pads", "num_crossings"), [(False, 1), (True, 0)])
def test_sizes_cross_to_the_host_once_and_never_where_they_are_padded(
    make: Make, pads: bool, num_crossings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, crossed = Plain(8 * 4), []
    on_host = token_dispatcher.on_host

    def counted(counts: Tensor, num_tokens: int) -> Tensor:
        crossed.append(counts)
        return on_host(counts, num_tokens)

    monkeypatch.setattr(token_dispatcher, "on_host", counted)

    def on_rank(mesh: Mesh) -> None:
        moe_forward(
            own(plain.hidden, mesh),
            own(plain.experts, mesh),
            own(plain.weights, mesh),
            dispatcher=dispatcher_of(make, mesh),
            experts=experts_of(plain, mesh),
            capacity=8 if pads else None,
        )

    on_mesh(4, 2, 2, on_rank)
    assert len(crossed) == 4 * num_crossings


@pytest.mark.parametrize("make", [AllToAllTokenDispatcher, AllGatherTokenDispatcher, SharedTokenDispatcher])
def test_a_rank_that_has_all_experts_and_knows_its_rows_reads_sizes_only_if_asked(make: Make) -> None:
    plain, read = Plain(9), list[Tensor]()
    plain.experts[(plain.experts == 2) | (plain.experts == E - 1)] = -1
    plain.experts[4] = -1
    out, num_rows = plain.run(), int((plain.experts >= 0).sum())
    sizes = tuple(int((plain.experts == expert).sum()) for expert in range(E))

    def reading(counts: Tensor, shape_TK: torch.Size) -> Tensor:
        read.append(counts)
        return token_dispatcher.on_host(counts, shape_TK)

    def on_rank(mesh: Mesh) -> None:
        dispatcher = dispatcher_of(make, mesh)
        dispatcher.read = reading
        arrived = dispatcher.dispatch(plain.hidden, plain.experts, plain.weights, num_rows=num_rows).wait()
        assert len(arrived.rows_RH) == len(arrived.probs_R) == arrived.groups.num_rows == num_rows
        assert arrived.groups.ends_L[-1] == num_rows and not read
        assert arrived.groups.sizes == arrived.groups.sizes == sizes and len(read) == 1
        check(plain, out, make, mesh, num_rows=num_rows)

    on_mesh(1, 1, 1, on_rank)


@with_either_dispatcher
@pytest.mark.parametrize(("ep", "etp", "num_waits"), [(1, 1, 0), (2, 1, 3), (1, 2, 3), (2, 2, 6)])
def test_every_wait_for_a_message_gives_way_in_both_directions_and_nothing_else_does(
    make: Make, ep: int, etp: int, num_waits: int
) -> None:
    plain = Plain(8 * ep * etp)

    def on_rank(mesh: Mesh) -> list[int]:
        dispatcher, turns = dispatcher_of(make, mesh), list[int]()
        dispatcher.yield_to_peer = lambda: turns.append(1)
        hidden, weights = (own(each, mesh).requires_grad_() for each in (plain.hidden, plain.weights))
        experts = experts_of(plain, mesh)
        mixed, _ = moe_forward(hidden, own(plain.experts, mesh), weights, dispatcher=dispatcher, experts=experts)
        there = len(turns)
        mixed.backward(own(plain.out_grad, mesh))
        return [there, len(turns) - there]

    # Tokens, their weights, and what comes combined, over each axis.
    assert on_mesh(ep * etp, ep, etp, on_rank) == [[num_waits] * 2] * (ep * etp)


class Beside(torch.autograd.Function):
    """Adds nothing, and calls `note` in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        note()
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return torch.zeros_like(grad), None


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (1, 2), (2, 2)])
def test_rows_and_weights_travel_while_something_else_is_computed_in_both_directions(
    monkeypatch: pytest.MonkeyPatch, ep: int, etp: int
) -> None:
    plain, started = Plain(8 * ep * etp), dict[int, list[Pending]]()
    real: Any = collectives.all_to_all_v

    def noting(*args: Any, **options: Any) -> Any:
        pending = real(*args, **options)
        started.setdefault(threading.get_ident(), []).append(pending)
        return pending

    monkeypatch.setattr(collectives, "all_to_all_v", noting)

    def on_rank(mesh: Mesh) -> list[int]:
        in_flight: list[int] = []

        def note() -> None:
            in_flight.append(sum(each.work is not None for each in started[threading.get_ident()]))

        hidden, weights = (own(each, mesh).requires_grad_() for each in (plain.hidden, plain.weights))
        mixed, overlapped_out = moe_forward(
            hidden,
            own(plain.experts, mesh),
            weights,
            dispatcher=dispatcher_of(AllToAllTokenDispatcher, mesh),
            experts=experts_of(plain, mesh),
            overlapped=lambda: Beside.apply(hidden, note),
        )
        (mixed + overlapped_out).backward(own(plain.out_grad, mesh))
        return in_flight

    assert on_mesh(ep * etp, ep, etp, on_rank) == [[2, 2]] * (ep * etp)


def test_the_gradients_of_experts_are_parts_of_a_sum_over_edp_and_of_no_other() -> None:
    plain = Plain(5 * 4)
    out = plain.run()

    def on_rank(mesh: Mesh) -> None:
        experts = experts_of(plain, mesh)
        mixed, _ = moe_forward(
            own(plain.hidden, mesh),
            own(plain.experts, mesh),
            own(plain.weights, mesh),
            dispatcher=dispatcher_of(AllToAllTokenDispatcher, mesh),
            experts=experts,
        )
        mixed.backward(own(plain.out_grad, mesh))
        assert_same(mixed, own(out, mesh))
        grad = experts.up.grad
        assert grad is not None
        summed = collectives.all_reduce(grad, mesh.axis("edp"))
        assert (summed - grad).abs().max() > BITE
        assert (summed / 2 - grad).abs().max() > BITE

    on_mesh(4, 2, 1, on_rank)


@with_either_dispatcher
def test_experts_that_are_recomputed_in_the_backward_equal_the_loop(make: Make) -> None:
    plain = Plain(5 * 4)
    out = plain.run()

    def on_rank(mesh: Mesh) -> None:
        experts, chosen = experts_of(plain, mesh), own(plain.experts, mesh)
        hidden, weights = own(plain.hidden, mesh).requires_grad_(), own(plain.weights, mesh).requires_grad_()

        def run(hidden: Tensor, weights: Tensor) -> Tensor:
            dispatcher = dispatcher_of(make, mesh)
            return moe_forward(hidden, chosen, weights, dispatcher=dispatcher, experts=experts)[0]

        mixed = recompute.checkpoint(run, hidden, weights)
        mixed.backward(own(plain.out_grad, mesh))
        assert_same(mixed, own(out, mesh))
        for leaf, unsharded in ((hidden, plain.hidden), (weights, plain.weights)):
            assert leaf.grad is not None and unsharded.grad is not None
            assert_same(leaf.grad, own(unsharded.grad, mesh))
        assert_expert_gradients(experts, plain)

    on_mesh(4, 2, 2, on_rank)


def gloo_rank(make: Make) -> None:
    """On real ranks, one of which has nothing to send."""

    def new_group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        return dist.new_group(list(ranks), use_local_synchronization=True)

    mesh = Mesh.build(Sizes(world=4, ep=2, etp=2), dist.get_rank(), new_group)
    plain = Plain(5 * 4)
    plain.experts[:5] = -1
    check(plain, plain.run(), make, mesh)


@with_either_dispatcher
def test_experts_equal_the_loop_on_real_ranks(make: Make) -> None:
    run_on_ranks(4, gloo_rank, make)
