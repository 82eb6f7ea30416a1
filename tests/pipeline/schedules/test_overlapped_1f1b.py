"""1F1B with overlapped forwards and backwards: what is paired, that it runs to its end, its memory and its time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.pipeline.lower import P2PBatch, lower
from lightning_megatron.pipeline.registry import order_of, overlapped_forwards, schedule_faults
from lightning_megatron.pipeline.schedule import Action, Kind
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.schedules.overlapped_1f1b import overlapped_one_f_one_b
from lightning_megatron.pipeline.simulate import check, play


@st.composite
def joint_schedules(draw: st.DrawFn) -> Schedule:
    pp, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 20))
    chunks = draw(st.integers(1, 3)) if pp > 1 else 1
    extra = draw(st.integers(0, 3)) if chunks > 1 else 0
    return Schedule(
        name="1f1b" if chunks == 1 else "interleaved",
        pp=pp,
        chunks=chunks,
        microbatches=microbatches,
        group_size=pp + extra if extra else 0,
        is_overlapped=True,
    )


def texts(schedule: Schedule) -> list[str]:
    """Each rank's order, with brackets around what runs side by side."""
    joint, lines = overlapped_forwards(schedule), []
    for actions in order_of(schedule):
        words, is_open = [], False
        for action in actions:
            words.append(f"({action}" if action in joint else f"{action})" if is_open else str(action))
            is_open = action in joint
        lines.append(" ".join(words))
    return lines


def test_the_order_of_two_ranks_is_the_one_drawn_by_hand() -> None:
    assert texts(Schedule(name="1f1b", pp=2, chunks=1, microbatches=5, is_overlapped=True)) == [
        "0F0 0F1 0F2 (0F3 0B0) (0F4 0B1) 0B2 0B3 0B4",
        "1F0 (1F1 1B0) (1F2 1B1) (1F3 1B2) (1F4 1B3) 1B4",
    ]


def test_one_rank_pairs_each_forward_with_the_backward_before() -> None:
    assert texts(Schedule(name="1f1b", pp=1, chunks=1, microbatches=3, is_overlapped=True)) == [
        "0F0 (0F1 0B0) (0F2 0B1) 0B2"
    ]


@settings(max_examples=200, deadline=None)
@given(schedule=joint_schedules())
def test_every_plan_runs_to_its_end_with_nothing_between_the_two_of_a_pair(schedule: Schedule) -> None:
    order, joint = order_of(schedule), overlapped_forwards(schedule)
    program = lower(order, joint)
    check(program.plan)
    for actions, steps in zip(order, program.plan, strict=True):
        assert [step for step in steps if step in set(actions)] == list(actions)
        for step, following in pairwise(steps):
            if step in joint:
                assert isinstance(step, Action) and step.kind is Kind.FORWARD
                assert isinstance(following, Action) and following.kind is Kind.BACKWARD
                assert (step.stage, step.microbatch) != (following.stage, following.microbatch)


@settings(max_examples=100, deadline=None)
@given(schedule=joint_schedules())
def test_no_rank_saves_more_than_the_docstring_says(schedule: Schedule) -> None:
    group = min(schedule.group_size or schedule.pp, schedule.microbatches)
    for rank, peak in enumerate(play(order_of(schedule)).peak_activations):
        most = 2 * (schedule.pp - rank - 1) + (schedule.chunks - 1) * group + 2
        assert peak <= min(most, schedule.chunks * schedule.microbatches)


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (2, 1), (4, 1), (4, 2), (3, 3)])
def test_the_bubble_is_that_of_the_order_without_pairs(pp: int, chunks: int) -> None:
    name = "1f1b" if chunks == 1 else "interleaved"
    joint, plain = (
        Schedule(name=name, pp=pp, chunks=chunks, microbatches=4 * pp, is_overlapped=is_overlapped)  # type: ignore[arg-type]
        for is_overlapped in (True, False)
    )
    assert play(lower(order_of(joint), overlapped_forwards(joint)).plan).bubble == pytest.approx(
        play(order_of(plain)).bubble
    )


def test_with_enough_microbatches_every_forward_past_the_warm_up_has_a_partner() -> None:
    order, joint = overlapped_one_f_one_b(pp=3, chunks=1, microbatches=9, group_size=3)
    for rank, actions in enumerate(order):
        assert sum(action in joint for action in actions) == 9 - (2 * (3 - rank - 1) + 1)


def test_messages_of_a_pair_are_awaited_before_it_and_sent_after_it() -> None:
    schedule = Schedule(name="1f1b", pp=3, chunks=1, microbatches=8, is_overlapped=True)
    plan = lower(order_of(schedule), overlapped_forwards(schedule)).plan
    middle = plan[1]
    at = middle.index(Action(Kind.FORWARD, 1, 5))
    before, after = middle[at - 1], middle[at + 2]
    assert isinstance(before, P2PBatch) and isinstance(after, P2PBatch)
    assert [str(message) for message in before.awaited] == ["1RF5", "1RB2"]
    assert [str(message) for message in after.posted[:2]] == ["1SF5", "1SB2"]


@pytest.mark.parametrize("name", ["gpipe", "zb_h1", "zb_v"])
def test_schedules_that_cannot_be_paired_say_which_can(name: str) -> None:
    schedule = Schedule(name=name, pp=2, chunks=2 if name == "zb_v" else 1, microbatches=4, is_overlapped=True)  # type: ignore[arg-type]
    assert schedule_faults(schedule) == [
        f"schedule {name} does not run a forward beside a backward; use 1f1b, interleaved or dualpipe_v for that"
    ]
