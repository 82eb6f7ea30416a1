"""Zero-bubble orders against their formulas, 1F1B, and the zero-bubble orders of torch."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from lightning_megatron.mesh import Sizes
from lightning_megatron.pipeline.lower import rank_of_stage
from lightning_megatron.pipeline.schedule import Action, Kind, Order
from lightning_megatron.pipeline.schedules.one_f_one_b import one_f_one_b
from lightning_megatron.pipeline.schedules.zero_bubble import zb_h1, zb_v
from lightning_megatron.pipeline.simulate import Costs, play

KINDS = {kind.value: kind for kind in Kind}
# Stages half as large, so that a rank with two of them does the work of one with a full one.
HALF = Costs(forward=0.5, backward=1, backward_input=0.5, backward_weight=0.5)
counts = {"pp": st.integers(1, 10), "microbatches": st.integers(1, 30)}


def texts(order: Order) -> list[str]:
    return [" ".join(map(str, actions)) for actions in order]


def displayed_by_torch(schedule: str, pp: int, microbatches: int) -> Order:
    displayed: Any = get_schedule_ops(schedule, pp, microbatches)
    parts = [[re.fullmatch(r"(\d+)([A-Z]+)(\d+)", str(a)) for a in actions if a is not None] for actions in displayed]
    return tuple(
        tuple(Action(KINDS[part[2]], int(part[1]), int(part[3])) for part in actions if part) for actions in parts
    )


def test_zb_h1_of_a_small_pipeline_is_the_one_drawn_by_hand() -> None:
    assert texts(zb_h1(pp=3, microbatches=4)) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_zb_v_of_a_small_pipeline_is_the_one_drawn_by_hand() -> None:
    assert texts(zb_v(pp=2, microbatches=3)) == [
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
    ]


@settings(max_examples=150, deadline=None)
@given(**counts)
def test_each_compute_is_there_once_and_in_turn_and_w_comes_after_i(pp: int, microbatches: int) -> None:
    for order, stages in (
        (zb_h1(pp=pp, microbatches=microbatches), pp),
        (zb_v(pp=pp, microbatches=microbatches), 2 * pp),
    ):
        # It returns only if every compute finds what it needs.
        play(order)
        for stage, rank in enumerate(rank_of_stage(order)):
            own = [action for action in order[rank] if action.stage == stage]
            for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
                assert [action.microbatch for action in own if action.kind is kind] == list(range(microbatches))
            for m in range(microbatches):
                kinds = [action.kind for action in own if action.microbatch == m]
                assert kinds == [Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]
        assert sum(map(len, order)) == 3 * stages * microbatches


@settings(max_examples=150, deadline=None)
@given(**counts)
def test_no_rank_saves_more_than_the_first_rank_of_one_f_one_b(pp: int, microbatches: int) -> None:
    first = max(play(one_f_one_b(pp=pp, microbatches=microbatches)).peak_activations)
    h1 = play(zb_h1(pp=pp, microbatches=microbatches)).peak_activations
    v = play(zb_v(pp=pp, microbatches=microbatches)).peak_activations
    assert max(h1) == first == min(pp, microbatches)
    # Two of the half as large activations of ZB-V make one.
    assert max(v) == 2 * first
    if microbatches >= 2 * pp:
        assert set(h1) == {pp}
        assert set(v) == {2 * pp}


@settings(max_examples=200, deadline=None)
@given(unit=st.sampled_from([0.25, 1.0, 3.0]), **counts)
def test_the_makespans_are_those_of_the_table(pp: int, microbatches: int, unit: float) -> None:
    whole = Costs(forward=unit, backward=2 * unit, backward_input=unit, backward_weight=unit)
    half = Costs(forward=unit / 2, backward=unit, backward_input=unit / 2, backward_weight=unit / 2)
    h1 = play(zb_h1(pp=pp, microbatches=microbatches), whole)
    v = play(zb_v(pp=pp, microbatches=microbatches), half)
    few = 2 * microbatches + 2 * pp - 1
    assert h1.makespan == unit * max(3 * microbatches + pp - 1, few)
    assert v.makespan == unit * max(3 * microbatches + (pp - 1) / 2, few)
    assert play(one_f_one_b(pp=pp, microbatches=microbatches), whole).makespan == unit * 3 * (microbatches + pp - 1)


@settings(max_examples=200, deadline=None)
@given(**counts)
def test_the_bubbles_are_a_third_and_a_sixth_of_that_of_one_f_one_b_and_never_more(pp: int, microbatches: int) -> None:
    h1 = play(zb_h1(pp=pp, microbatches=microbatches))
    v = play(zb_v(pp=pp, microbatches=microbatches), HALF)
    if microbatches >= pp:
        assert h1.bubbles == pytest.approx([(pp - 1) / (3 * microbatches + pp - 1)] * pp)
    if microbatches >= 3 * pp // 2:
        assert v.bubbles == pytest.approx([(pp - 1) / (6 * microbatches + pp - 1)] * pp)
    assert v.bubble <= h1.bubble + 1e-12
    assert h1.bubble <= (pp - 1) / (microbatches + pp - 1) + 1e-12


@settings(max_examples=100, deadline=None)
@given(
    cost=st.tuples(*[st.sampled_from([1.0, 1.25, 1.5, 2.0])] * 3), pp=counts["pp"], more_microbatches=st.integers(0, 20)
)
def test_with_unlike_costs_zb_h1_is_still_not_slower_than_one_f_one_b(
    cost: tuple[float, float, float], pp: int, more_microbatches: int
) -> None:
    forward, backward_input, backward_weight = cost
    costs = Costs(
        forward=forward,
        backward=backward_input + backward_weight,
        backward_input=backward_input,
        backward_weight=backward_weight,
    )
    microbatches = pp + more_microbatches
    split = play(zb_h1(pp=pp, microbatches=microbatches), costs).makespan
    assert split <= play(one_f_one_b(pp=pp, microbatches=microbatches), costs).makespan + 1e-9


@pytest.mark.parametrize("pp", [1, 2, 3, 8])
def test_stages_are_where_the_mesh_puts_them(pp: int) -> None:
    for order, sizes in (
        (zb_h1(pp=pp, microbatches=2), Sizes(world=pp, pp=pp)),
        (zb_v(pp=pp, microbatches=2), Sizes(world=pp, pp=pp, vp=2, placement="v")),
    ):
        assert rank_of_stage(order) == tuple(map(sizes.pp_rank_of, range(sizes.num_stages)))
        assert rank_of_stage(order)[-1] == pp - 1


@pytest.mark.parametrize("make", [zb_h1, zb_v])
def test_no_ranks_and_no_microbatches_are_refused_together(make: Any) -> None:
    with pytest.raises(ValueError, match=r"pp \(0\) must be at least 1; microbatches \(-2\) must be at least 1"):
        make(pp=0, microbatches=-2)


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 2), (2, 2), (2, 5), (3, 6), (4, 3), (4, 8), (6, 9), (8, 16)])
def test_zb_v_is_torchs_with_the_ranks_counted_backwards(pp: int, microbatches: int) -> None:
    # torch follows the paper: the first and the last stage are on rank 0.
    assert zb_v(pp=pp, microbatches=microbatches) == displayed_by_torch("ZBVZeroBubble", pp, microbatches)[::-1]


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (3, 6), (4, 6), (4, 10), (8, 16)])
def test_torchs_interleaved_zero_bubble_is_as_fast_as_zb_v_and_saves_no_less(pp: int, microbatches: int) -> None:
    # torch has no ZB-H1: its ZB1P runs two or more chunks in the loop placement, where W starts later. Of the same
    # computes it makes another order on other ranks; what can be compared is its time and its memory.
    theirs = displayed_by_torch("InterleavedZeroBubble", pp, microbatches)
    ours = zb_v(pp=pp, microbatches=microbatches)
    assert Counter(sum(theirs, ())) == Counter(sum(ours, ()))
    assert play(ours, HALF).makespan <= play(theirs, HALF).makespan
    assert max(play(ours).peak_activations) <= max(play(theirs).peak_activations)
    # ZB-H1 does the same work in full stages: slower by half of its bubble, with at most the same memory.
    whole = play(zb_h1(pp=pp, microbatches=microbatches))
    assert whole.makespan == play(theirs, HALF).makespan + (pp - 1) / 2
    assert 2 * max(whole.peak_activations) <= max(play(theirs).peak_activations)
