"""Interleaved 1F1B against its formulas, Megatron's pairing of turns, and torch's order."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from lightning_megatron.pipeline.schedule import Action, Kind, Order, ScheduleError, paired
from lightning_megatron.pipeline.schedules.interleaved import interleaved_one_f_one_b
from lightning_megatron.pipeline.schedules.one_f_one_b import one_f_one_b
from lightning_megatron.pipeline.simulate import Costs, play

sizes = {
    "pp": st.integers(1, 6),
    "chunks": st.integers(2, 4),
    "microbatches": st.integers(1, 26),
    "beyond_pp": st.integers(0, 7),
}


def texts(order: Order) -> list[str]:
    return [" ".join(map(str, actions)) for actions in order]


def paired_by_position(pp: int, chunks: int, microbatches: int, group_size: int) -> Order:
    """Megatron's rule: the last group has as many turns as microbatches, and forward k goes with backward k - warm-up,
    whichever microbatches these are."""
    turns = [
        (chunk, m)
        for first in range(0, microbatches, group_size)
        for chunk in range(chunks)
        for m in range(first, min(first + group_size, microbatches))
    ]
    return tuple(
        paired(
            [Action(Kind.FORWARD, chunk * pp + rank, m) for chunk, m in turns],
            [Action(Kind.BACKWARD, (chunks - 1 - chunk) * pp + rank, m) for chunk, m in turns],
            num_warmup=min(2 * (pp - rank - 1) + (chunks - 1) * group_size, len(turns)),
        )
        for rank in range(pp)
    )


def test_the_order_of_two_ranks_is_the_one_drawn_by_hand() -> None:
    assert texts(interleaved_one_f_one_b(pp=2, chunks=2, microbatches=4, group_size=2)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


@settings(max_examples=300, deadline=None)
@given(**sizes)
def test_any_number_of_microbatches_runs_each_compute_once_within_the_memory_of_the_warm_up(
    pp: int, chunks: int, microbatches: int, beyond_pp: int
) -> None:
    group_size = pp + beyond_pp
    order = interleaved_one_f_one_b(pp=pp, chunks=chunks, microbatches=microbatches, group_size=group_size)
    # It returns only if every compute finds what it needs.
    timeline = play(order)
    for rank, actions in enumerate(order):
        assert len(actions) == 2 * chunks * microbatches
        for stage in range(rank, pp * chunks, pp):
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                in_turn = [action.microbatch for action in actions if (action.stage, action.kind) == (stage, kind)]
                assert in_turn == list(range(microbatches))
        num_warmup = 2 * (pp - rank - 1) + (chunks - 1) * min(group_size, microbatches)
        assert timeline.peak_activations[rank] <= min(num_warmup + 1, chunks * microbatches)


@settings(max_examples=100, deadline=None)
@given(num_groups=st.integers(1, 4), **{name: sizes[name] for name in ("pp", "chunks", "beyond_pp")})
def test_with_full_groups_the_warm_up_is_megatrons_and_all_of_its_memory_is_used(
    pp: int, chunks: int, num_groups: int, beyond_pp: int
) -> None:
    group_size = pp + beyond_pp
    microbatches = num_groups * group_size
    order = interleaved_one_f_one_b(pp=pp, chunks=chunks, microbatches=microbatches, group_size=group_size)
    for rank, peak in enumerate(play(order).peak_activations):
        before = next(at for at, action in enumerate(order[rank]) if action.kind is Kind.BACKWARD)
        # The forwards of the warm-up, and the one with which the first backward makes a pair if one is left.
        assert before == min(2 * (pp - rank - 1) + (chunks - 1) * group_size + 1, chunks * microbatches)
        assert peak == before
    assert order == paired_by_position(pp, chunks, microbatches, group_size)


@settings(max_examples=200, deadline=None)
@given(backward=st.sampled_from([1.0, 2.0, 5.0]), **sizes)
def test_the_bubble_is_p_minus_1_of_v_m_plus_p_minus_1_if_the_last_group_has_pp_microbatches(
    pp: int, chunks: int, microbatches: int, beyond_pp: int, backward: float
) -> None:
    group_size = pp + beyond_pp
    num_in_last = microbatches % group_size or group_size
    order = interleaved_one_f_one_b(pp=pp, chunks=chunks, microbatches=microbatches, group_size=group_size)
    timeline = play(order, Costs(backward=backward))
    num_lacking = max(0, pp - num_in_last)
    ideal = (chunks * microbatches + pp - 1) * (1 + backward)
    assert ideal <= timeline.makespan <= ideal + (chunks - 1) * num_lacking * (1 + backward)
    if not num_lacking:
        assert timeline.bubbles == pytest.approx([(pp - 1) / (chunks * microbatches + pp - 1)] * pp)


@settings(max_examples=200, deadline=None)
@given(**sizes)
def test_it_is_never_slower_than_pairing_by_position_and_as_fast_where_megatron_allows_that(
    pp: int, chunks: int, microbatches: int, beyond_pp: int
) -> None:
    group_size = pp + beyond_pp
    order = interleaved_one_f_one_b(pp=pp, chunks=chunks, microbatches=microbatches, group_size=group_size)
    by_position = paired_by_position(pp, chunks, microbatches, group_size)
    assert [set(actions) for actions in order] == [set(actions) for actions in by_position]
    num_in_last = microbatches % group_size
    if num_in_last == 0 or num_in_last >= pp:
        assert play(order).makespan == play(by_position).makespan
        return
    try:
        slower = play(by_position).makespan
    except ScheduleError:
        return
    assert play(order).makespan <= slower


def test_pairing_by_position_hangs_with_a_small_last_group_and_ours_does_not() -> None:
    with pytest.raises(ScheduleError, match="wait for each other"):
        play(paired_by_position(4, 3, 5, 4))
    order = interleaved_one_f_one_b(pp=4, chunks=3, microbatches=5, group_size=4)
    assert play(order).bubble < play(one_f_one_b(pp=4, microbatches=5)).bubble


@pytest.mark.parametrize(
    ("pp", "chunks", "microbatches"), [(2, 2, 2), (2, 3, 8), (3, 2, 2), (4, 2, 8), (4, 4, 16), (4, 2, 10), (4, 3, 3)]
)
def test_it_is_torchs_order(pp: int, chunks: int, microbatches: int) -> None:
    # Torch knows no group size: it makes as many groups of at least pp as there can be, all alike.
    displayed: Any = get_schedule_ops("Interleaved1F1B", pp, microbatches, chunks)
    group_size = microbatches // max(1, microbatches // pp)
    order = interleaved_one_f_one_b(pp=pp, chunks=chunks, microbatches=microbatches, group_size=max(group_size, pp))
    assert texts(order) == [" ".join(str(a) for a in actions if a and a.is_compute_op) for actions in displayed]


@settings(max_examples=50, deadline=None)
@given(pp=sizes["pp"], microbatches=sizes["microbatches"], beyond_pp=sizes["beyond_pp"])
def test_with_one_chunk_it_is_one_f_one_b(pp: int, microbatches: int, beyond_pp: int) -> None:
    order = interleaved_one_f_one_b(pp=pp, chunks=1, microbatches=microbatches, group_size=pp + beyond_pp)
    assert order == one_f_one_b(pp=pp, microbatches=microbatches)


def test_one_rank_has_no_bubble() -> None:
    order = interleaved_one_f_one_b(pp=1, chunks=2, microbatches=2, group_size=1)
    assert texts(order) == ["0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"]
    assert play(order).bubble == 0


def test_groups_smaller_than_pp_are_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=re.escape("group_size (3) must be at least pp (4); use 4 or more")):
        interleaved_one_f_one_b(pp=4, chunks=2, microbatches=8, group_size=3)
    with pytest.raises(ValueError, match=r"chunks \(0\) must be at least 1; microbatches \(0\) must be at least 1"):
        interleaved_one_f_one_b(pp=4, chunks=0, microbatches=0, group_size=4)


def test_groups_smaller_than_pp_would_stand_idle_or_hang() -> None:
    with pytest.raises(ScheduleError, match="wait for each other"):
        play(paired_by_position(5, 2, 6, 3))
    assert play(paired_by_position(4, 2, 6, 3)).makespan > 3 * (12 + 3)
