"""The checker against broken plans and a slower checker, the clock against the formulas of the papers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.pipeline.lower import Exchange, Plan, Step, add_messages
from lightning_megatron.pipeline.schedule import (
    WHOLE_STAGE,
    Action,
    Kind,
    Order,
    ScheduleError,
    forward_only,
    one_f_one_b,
)
from lightning_megatron.pipeline.simulate import Costs, check, draw, play

KINDS = {kind.value: kind for kind in Kind}
counts = {"pp": st.integers(1, 9), "microbatches": st.integers(1, 20)}


def plan_of(*lines: str) -> Plan:
    """A plan from its text: `0F0 [0SF0 0RB0] 0B0` for each rank."""
    return tuple(tuple(map(step_of, re.findall(r"\[[^]]*\]|\S+", line))) for line in lines)


def step_of(text: str) -> Step:
    actions = tuple(
        Action(KINDS[kind], int(stage), int(microbatch or WHOLE_STAGE))
        for stage, kind, microbatch in re.findall(r"(\d+)([A-Z]+)(\d*)", text)
    )
    return Exchange(actions) if text.startswith("[") else actions[0]


def fault_of(plan: Plan) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(plan)
    return str(caught.value)


# -- check: what passes


@settings(max_examples=150, deadline=None)
@given(**counts)
def test_one_f_one_b_passes(pp: int, microbatches: int) -> None:
    check(add_messages(one_f_one_b(pp=pp, microbatches=microbatches)))


@settings(max_examples=50, deadline=None)
@given(**counts)
def test_forward_only_passes(pp: int, microbatches: int) -> None:
    check(add_messages(forward_only(pp=pp, microbatches=microbatches)))


@pytest.mark.parametrize(
    "lines",
    [
        ("0F0 0F1 3F0 3B0 3F1 0B0 3B1 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"),
        ("0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0"),
        ("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"),
        ("0F0 1F0 1B0 0B0",),
    ],
    ids=["V placement", "ring of two", "split backward", "two stages on one rank"],
)
def test_other_placements_and_split_backwards_pass(lines: tuple[str, ...]) -> None:
    check(add_messages(plan_of(*lines)))  # type: ignore[arg-type]


def test_actions_on_a_whole_stage_pass_between_the_computes() -> None:
    check(plan_of("0GP 0F0 [0SF0] [0RB0] 0B0 0RG", "1GP [1RF0] 1F0 1B0 [1SB0] 1RG"))


# -- check: what does not

GOOD = (
    "0F0 [0SF0] 0F1 [0SF1 0RB0] 0B0 [0RB1] 0B1",
    "[1RF0] 1F0 1B0 [1SB0 1RF1] 1F1 1B1 [1SB1]",
)


def broken(rank: int, old: str, new: str) -> Plan:
    lines = list(GOOD)
    assert old in lines[rank]
    lines[rank] = lines[rank].replace(old, new)
    return plan_of(*lines)


def test_the_plan_that_the_next_tests_break_is_good() -> None:
    plan = plan_of(*GOOD)
    assert plan == add_messages(one_f_one_b(pp=2, microbatches=2))
    check(plan)


@pytest.mark.parametrize(
    ("rank", "old", "new", "fault"),
    [
        (1, "1RF1", "", r"rank 1, step 4, 1F1: no step of rank 1 before it brings the input of stage 1, microbatch 1"),
        (0, " [0RB1]", "", r"rank 0, step 5, 0B1: .* the gradient of the output of stage 0, microbatch 1"),
        (0, "0SF1 ", "", r"rank 1, step 3, 1RF1: its other end, 0SF1, is not in the plan"),
        (1, " [1SB1]", "", r"rank 0, step 5, 0RB1: its other end, 1SB1, is not in the plan"),
        (0, "0F0 [0SF0] 0F1", "0F0 [0SF1] 0F1", r"rank 0, step 1, 0SF1: .* brings the output of stage 0, microbatch 1"),
        (1, "1F1 1B1", "1B1 1F1", r"rank 1, step 4, 1B1: .* brings the output of stage 1, microbatch 1"),
        (1, "1F1 1B1", "1F1 1F1 1B1", r"rank 1, step 5, 1F1: an earlier step of rank 1 has brought the output"),
        (1, "1B1 [1SB1]", "1B1 [1SB1] [1SB1]", r"rank 1, step 7, 1SB1: an earlier step of rank 1"),
        (0, "[0RB1] 0B1", "[0RB1]", r"rank 0, step 6, the end: .* makes the gradient of the input .*, microbatch 1"),
        (1, "1B1", "1I1", r"rank 1, step 7, the end: .* makes the gradients of the weights of stage 1, microbatch 1"),
        (1, "1B1", "1W1", r"rank 1, step 5, 1W1: .* brings the gradient of the input of stage 1, microbatch 1"),
        (1, "1B1", "1B1 1W1", r"rank 1, step 6, 1W1: .* has brought the gradients of the weights"),
        (0, "[0RB1]", "0RB1", r"rank 0, step 5, 0RB1: messages, and nothing else, stand in an Exchange"),
        (1, "[1SB1]", "[1SB1 1SF1]", r"rank 1, step 6, 1SF1: there is no stage 2; the stages are 0 to 1"),
        (0, "[0SF0]", "[1SF0]", r"rank 0, step 1, 1SF0: stage 1 is not on rank 0"),
    ],
)
def test_a_broken_plan_is_named_with_rank_step_and_action(rank: int, old: str, new: str, fault: str) -> None:
    assert re.match(fault, fault_of(broken(rank, old, new)))


def test_a_message_within_one_rank_is_named() -> None:
    assert "stage 1 is on rank 0 too" in fault_of(plan_of("0F0 [0SF0 1RF0] 1F0"))


def test_messages_posted_in_two_orders_are_named() -> None:
    plan = plan_of("0F0 0F1 [0SF0 0SF1]", "[1RF1 1RF0] 1F0 1F1")
    fault = fault_of(plan)
    assert fault.startswith("rank 1, step 0, 1RF1: rank 0 sends 0SF0 before 0SF1, and messages from one rank")
    check(plan_of("0F0 0F1 [0SF0 0SF1]", "[1RF0 1RF1] 1F0 1F1"))


def test_with_two_ranks_in_a_ring_messages_of_different_direction_must_match_in_order_too() -> None:
    # The next rank is also the previous one: a gradient and an activation travel from rank 0 to rank 1. A rank that
    # took one for the other would train on, with wrong numbers.
    good = plan_of(
        "0F0 [0SF0 2RF0] 2F0 [2SF0 2RB0] 2B0 0F1 [2SB0 0SF1] [0RB0] 0B0 [2RF1] 2F1 [2SF1 2RB1] 2B1 [2SB1 0RB1] 0B1",
        "[1RF0] 1F0 [1SF0 3RF0] 3F0 3B0 [3SB0] [1RB0 1RF1] 1B0 [1SB0] 1F1 [1SF1 3RF1] 3F1 3B1 [3SB1 1RB1] 1B1 [1SB1]",
    )
    check(good)
    swapped = tuple(
        tuple(
            Exchange(step.messages[::-1]) if isinstance(step, Exchange) and str(step) == "[1RB0 1RF1]" else step
            for step in steps
        )
        for steps in good
    )
    assert fault_of(swapped).startswith("rank 1, step 6, 1RF1: rank 0 sends 2SB0 before 0SF1")


def test_opposite_sends_that_are_not_batched_are_named_as_a_circle() -> None:
    unbatched = plan_of(
        "0F0 [0SF0] 0F1 [0SF1] [0RB0] 0B0 [0RB1] 0B1",
        "[1RF0] 1F0 1B0 [1SB0] [1RF1] 1F1 1B1 [1SB1]",
    )
    assert fault_of(unbatched).splitlines() == [
        "the plan never ends, its ranks wait for each other:",
        "rank 0, step 3, 0SF1: waits for 1RF1 of rank 1",
        "rank 1, step 3, 1SB0: waits for 0RB0 of rank 0",
        "step   0      1      2   3        4      5   6      7      8",
        "rank 0 0F0    [0SF0] 0F1 >[0SF1]< [0RB0] 0B0 [0RB1] 0B1    end",
        "rank 1 [1RF0] 1F0    1B0 >[1SB0]< [1RF1] 1F1 1B1    [1SB1] end",
    ]


def test_a_rank_that_only_waits_for_a_circle_is_not_named_as_part_of_it() -> None:
    plan = [list(steps) for steps in add_messages(one_f_one_b(pp=4, microbatches=6))]
    for rank in (2, 3):
        plan[rank] = [
            Exchange((message,)) if isinstance(step, Exchange) else step
            for step in plan[rank]
            for message in (step.messages if isinstance(step, Exchange) else (step,))
        ]
    named = re.findall(r"^rank (\d), step \d+, \S+: waits", fault_of(tuple(map(tuple, plan))), re.MULTILINE)
    assert sorted(named) == ["2", "3"]


def test_of_a_long_plan_only_the_part_around_the_fault_is_shown() -> None:
    plan = list(add_messages(one_f_one_b(pp=2, microbatches=100)))
    plan[1] = tuple(step for step in plan[1] if str(step) != "1B50")
    lines = fault_of(tuple(plan)).splitlines()
    assert len(lines) == 4
    assert "1SB50" in lines[0]
    assert ">[1SB50 1RF51]<" in lines[3]
    assert max(map(len, lines)) < 250


# -- check against a slower, simpler one


class CannotRun(Exception):
    pass


def runs_to_its_end(plan: Plan, microbatches: int) -> bool:
    """Whether a plan, rank r holding stage r, runs over queues: each rank is a program, tried again and again."""
    sends: dict[tuple[int, int], list[object]] = defaultdict(list)
    receives: dict[tuple[int, int], list[object]] = defaultdict(list)
    hands: list[set[str]] = [set() for _ in plan]

    def program(rank: int) -> Iterator[None]:
        for step in plan[rank]:
            if isinstance(step, Action):
                needs = {("RF" if step.kind is Kind.FORWARD else "F", rank > 0 or step.kind is Kind.BACKWARD)}
                needs |= {("RB", step.kind is Kind.BACKWARD and rank < len(plan) - 1)}
                take(rank, step, {f"{name}{step.microbatch}" for name, is_needed in needs if is_needed})
                continue
            posted = []
            for message in step.messages:
                peer = rank + (1 if message.kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD) else -1)
                what = (message.kind.value[1], message.microbatch)
                if message.kind.value[0] == "S":
                    take(rank, message, {f"{what[0]}{what[1]}"})
                    mine, theirs = sends[rank, peer], receives[rank, peer]
                else:
                    take(rank, message, set())
                    mine, theirs = receives[peer, rank], sends[peer, rank]
                mine.append(what)
                posted.append((what, len(mine) - 1, theirs))
            while any(len(theirs) <= place for _, place, theirs in posted):
                yield
            if any(theirs[place] != what for what, place, theirs in posted):
                raise CannotRun

    def take(rank: int, action: Action, needs: set[str]) -> None:
        name = f"{action.kind.value}{action.microbatch}"
        if not needs <= hands[rank] or name in hands[rank]:
            raise CannotRun
        hands[rank].add(name)

    programs = [program(rank) for rank in range(len(plan))]
    try:
        for _ in range(sum(map(len, plan)) + 1):
            programs = [p for p in programs if next(p, "ended") is None]
    except CannotRun:
        return False
    wanted = {f"{kind}{m}" for kind in "FB" for m in range(microbatches)}
    return not programs and all(wanted <= hand for hand in hands)


def change(plan: Plan, how: str, rank: int, at: int) -> Plan:
    steps = list(plan[rank % len(plan)])
    at %= len(steps)
    step = steps[at]
    messages = step.messages if isinstance(step, Exchange) else ()
    singles: list[Step] = [Exchange((message,)) for message in messages] or [step]
    if how == "drop":
        del steps[at]
    elif how == "repeat":
        steps.insert(at, step)
    elif how == "move":
        steps.insert(at + 1, steps.pop(at))
    elif how == "delay":
        steps.insert(at + 2, steps.pop(at))
    elif how == "split":
        steps[at : at + 1] = singles
    elif how == "reverse":
        steps[at : at + 1] = singles[::-1]
    elif how == "lose" and messages:
        steps[at] = Exchange(messages[1:])
    elif how == "join" and messages and at + 2 < len(steps) and isinstance(later := steps[at + 2], Exchange):
        steps[at] = Exchange(messages + later.messages)
        del steps[at + 2]
    lines = list(plan)
    lines[rank % len(plan)] = tuple(steps)
    return tuple(lines)


# Those that can end in a circle more often than those that are found at a glance.
CHANGES = ["drop", "repeat", "move", "delay", "lose", *["split", "reverse", "join"] * 3]


@settings(max_examples=400, deadline=None)
@given(
    pp=st.integers(2, 4),
    microbatches=st.integers(2, 5),
    changes=st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 3), st.integers(0, 30)), max_size=4),
)
def test_a_changed_plan_passes_exactly_if_queues_would_carry_it(
    pp: int, microbatches: int, changes: list[tuple[str, int, int]]
) -> None:
    plan = add_messages(one_f_one_b(pp=pp, microbatches=microbatches))
    for how, rank, at in changes:
        plan = change(plan, how, rank, at)
    try:
        check(plan)
        passes = True
    except ScheduleError:
        passes = False
    assert passes == runs_to_its_end(plan, microbatches)


# -- play


@settings(max_examples=150, deadline=None)
@given(cost=st.sampled_from([0.1, 1.0, 3.0]), backward_ratio=st.sampled_from([1.0, 2.0, 0.5]), **counts)
def test_the_bubble_of_one_f_one_b_is_p_minus_1_of_m_plus_p_minus_1(
    pp: int, microbatches: int, cost: float, backward_ratio: float
) -> None:
    order = one_f_one_b(pp=pp, microbatches=microbatches)
    costs = Costs(forward=cost, backward=cost * backward_ratio)
    for plan in (order, add_messages(order)):
        timeline = play(plan, costs)
        assert timeline.bubble == pytest.approx((pp - 1) / (microbatches + pp - 1))
        assert timeline.bubbles == pytest.approx([timeline.bubble] * pp)
        assert timeline.makespan == pytest.approx((microbatches + pp - 1) * cost * (1 + backward_ratio))


@settings(max_examples=100, deadline=None)
@given(**counts)
def test_rank_r_keeps_min_of_p_minus_r_and_m_activations(pp: int, microbatches: int) -> None:
    timeline = play(one_f_one_b(pp=pp, microbatches=microbatches))
    assert timeline.peak_activations == tuple(min(pp - rank, microbatches) for rank in range(pp))


def test_forward_only_keeps_one_activation_and_all_forwards_first_keeps_all() -> None:
    assert play(forward_only(pp=3, microbatches=7)).peak_activations == (1, 1, 1)
    gpipe = plan_of("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")
    assert play(gpipe).peak_activations == (3, 3)


def test_of_a_split_backward_the_weight_half_frees_the_activation() -> None:
    assert play(plan_of("0F0 0I0 0F1 0I1 0W0 0W1")).peak_activations == (2,)
    assert play(plan_of("0F0 0I0 0W0 0F1 0I1 0W1")).peak_activations == (1,)


@settings(max_examples=100, deadline=None)
@given(message=st.sampled_from([0.0, 0.25, 2.0]), **counts)
def test_no_compute_starts_before_its_input_has_arrived(pp: int, microbatches: int, message: float) -> None:
    order = one_f_one_b(pp=pp, microbatches=microbatches)
    for plan in (order, add_messages(order)):
        timeline = play(plan, Costs(message=message))
        spans = {str(span.action): span for rank_spans in timeline.spans for span in rank_spans}
        assert len(spans) == 2 * pp * microbatches
        for rank, rank_spans in enumerate(timeline.spans):
            assert [span.action for span in rank_spans] == list(order[rank])
            for earlier, later in pairwise(rank_spans):
                assert earlier.end <= later.start
            for span in rank_spans:
                is_forward = span.action.kind is Kind.FORWARD
                source = f"{rank - 1 if is_forward else rank + 1}{span.action.kind.value}{span.action.microbatch}"
                if source in spans:
                    assert span.start >= spans[source].end + message


def test_a_message_holds_the_rank_in_a_plan_and_not_in_an_order() -> None:
    order: Order = forward_only(pp=2, microbatches=2)
    costs = Costs(forward=1, message=10)
    # Order: 0F0 ends at 1, 0F1 at 2; 1F0 starts at 11, 1F1 at 12.
    assert play(order, costs).makespan == 13
    # Plan: the first message is complete at 11, 0F1 runs until 12, the second message until 22.
    assert play(add_messages(order), costs).makespan == 23


@pytest.mark.parametrize("sender", [0, 1])
def test_a_send_holds_its_rank_until_the_other_end_is_posted(sender: int) -> None:
    fast = "0F0 [0SF0] 0F1 [0SF1] 0F2 [0SF2]"
    slow = "[1RF0] 1F0 2F0 [1RF1] 1F1 2F1 [1RF2] 1F2 2F2"
    timeline = play(plan_of(*((fast, slow) if sender == 0 else (slow, fast))), Costs(forward=1, message=0.5))
    # The receiver is busy from 1.5 to 3.5 and from 4 to 6, so 0SF1 is complete at 4 and 0SF2 at 6.5.
    assert [span.start for span in timeline.spans[sender]] == [0, 1.5, 4]
    assert [span.start for span in timeline.spans[1 - sender]] == [1.5, 2.5, 4, 5, 6.5, 7.5]


def test_the_halves_of_a_split_backward_have_their_own_costs() -> None:
    timeline = play(plan_of("0F0 0I0 0W0"), Costs(forward=1, backward_input=4, backward_weight=16))
    assert [(span.start, span.end) for span in timeline.spans[0]] == [(0, 1), (1, 5), (5, 21)]
    assert timeline.bubble == 0


def test_an_order_that_cannot_end_is_named() -> None:
    with pytest.raises(ScheduleError, match="rank 0, step 1, 0B0: waits for 1B0 of rank 1\nrank 1, step 0, 1F1: waits"):
        play(plan_of("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"))


def test_costs_that_are_none_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"cost backward \(-1\) must .* 0; the cost message \(nan\) must"):
        Costs(backward=-1, message=float("nan"))
    with pytest.raises(ValueError, match=r"cost forward \(0\) must be above 0"):
        Costs(forward=0)


# -- draw


def test_the_drawing_shows_when_each_action_runs() -> None:
    assert draw(play(one_f_one_b(pp=2, microbatches=2))).splitlines() == [
        "time   0   1   2   4   5   6 7   bubble peak",
        "rank 0 0F0 0F1 .   0B0 =   . 0B1 33.3%  2",
        "rank 1 .   1F0 1B0 1F1 1B1 = .   33.3%  1",
        "makespan 9, bubble 33.3%",
    ]


def test_the_drawing_has_no_columns_for_what_only_rounding_tells_apart() -> None:
    thirds = draw(play(one_f_one_b(pp=4, microbatches=8), Costs(forward=0.1, backward=0.2)))
    whole = draw(play(one_f_one_b(pp=4, microbatches=8), Costs(forward=1, backward=2)))
    assert thirds.splitlines()[1].split() == whole.splitlines()[1].split()
