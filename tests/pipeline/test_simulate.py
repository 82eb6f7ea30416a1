"""The checker against broken plans and a slower checker, the clock against the formulas of the papers."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.pipeline.lower import SENDS, P2PBatch, Plan, add_messages, lower
from lightning_megatron.pipeline.schedule import Action, Kind, Order, ScheduleError, forward_chunks
from lightning_megatron.pipeline.schedules.gpipe import gpipe
from lightning_megatron.pipeline.schedules.one_f_one_b import one_f_one_b
from lightning_megatron.pipeline.simulate import Costs, check, play
from tests.pipeline.queues import order_of_text, plan_of_text, runs_to_its_end, text_of

counts = {"pp": st.integers(1, 9), "microbatches": st.integers(1, 20)}


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
    check(add_messages(forward_chunks(ranks=tuple(range(pp)), microbatches=microbatches)))


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
    check(add_messages(order_of_text(*lines)))


def test_actions_on_a_whole_stage_pass_between_the_computes() -> None:
    check(plan_of_text("0GP 0F0 [0SF0 0RB0 0RB0!] 0B0 0RG", "[1RF0] 1GP [1RF0!] 1F0 1B0 [1SB0] 1RG"))


# -- check: what does not

GOOD = (
    "0F0 [0SF0 0RB0] 0F1 [0SF1 0RB1 0RB0! 0SF0-] 0B0 [0RB1! 0SF1-] 0B1",
    "[1RF0 1RF0!] 1F0 [1RF1] 1B0 [1SB0 1RF1!] 1F1 1B1 [1SB1]",
)


def broken(rank: int, old: str, new: str) -> Plan:
    lines = list(GOOD)
    assert old in lines[rank]
    lines[rank] = lines[rank].replace(old, new)
    return plan_of_text(*lines)


def test_the_plan_that_the_next_tests_break_is_good() -> None:
    plan = plan_of_text(*GOOD)
    assert plan == add_messages(one_f_one_b(pp=2, microbatches=2))
    assert text_of(plan) == list(GOOD)
    check(plan)


@pytest.mark.parametrize(
    ("rank", "old", "new", "fault"),
    [
        (
            1,
            " 1RF1!",
            "",
            r"rank 1, step 5, 1F1: no step of rank 1 before it brings the input of stage 1, microbatch 1",
        ),
        (0, "[0RB1! 0SF1-] ", "", r"rank 0, step 5, 0B1: .* the gradient of the output of stage 0, microbatch 1"),
        (0, "0SF1 ", "", r"rank 0, step 5, 0SF1: .* brings a send of the output of stage 0, microbatch 1"),
        (1, " [1SB1]", "", r"rank 0, step 3, 0RB1: its other end, 1SB1, is not in the plan"),
        (1, "[1RF1] 1B0 [1SB0 1RF1!]", "1B0 [1SB0 1RF1!]", r"rank 1, step 3, 1RF1: .* brings a receive of the input"),
        (1, "[1RF1] 1B0 [1SB0 1RF1!]", "[1RF1!] 1B0 [1SB0 1RF1]", r"rank 1, step 2, 1RF1: .* a receive of the input"),
        (0, "0F0 [0SF0 0RB0]", "[0RB0] 0F0 [0SF0]", r"rank 0, step 0, 0RB0: .* brings the output of stage 0"),
        (0, "0F0 [0SF0", "0F0 [0SF1", r"rank 0, step 1, 0SF1: .* brings the output of stage 0, microbatch 1"),
        (1, "1F1 1B1", "1B1 1F1", r"rank 1, step 5, 1B1: .* brings the output of stage 1, microbatch 1"),
        (1, "1F1 1B1", "1F1 1F1 1B1", r"rank 1, step 6, 1F1: an earlier step of rank 1 has brought the output"),
        (1, "1B1 [1SB1]", "1B1 [1SB1] [1SB1]", r"rank 1, step 8, 1SB1: an earlier step of rank 1 has brought a send"),
        (1, "1RF1!", "1RF1! 1RF1!", r"rank 1, step 4, 1RF1: an earlier step of rank 1 has brought the input"),
        (
            1,
            "[1RF1]",
            "[1RF1 1RF1]",
            r"rank 1, step 2, 1RF1: an earlier step of rank 1 has brought a receive of the in",
        ),
        (0, " [0RB1! 0SF1-] 0B1", "", r"rank 0, step 5, the end: .* makes the gradient of the input .*, microbatch 1"),
        (1, "1B1", "1I1", r"rank 1, step 8, the end: .* makes the gradients of the weights of stage 1, microbatch 1"),
        (1, "1B1", "1W1", r"rank 1, step 6, 1W1: .* brings the gradient of the input of stage 1, microbatch 1"),
        (1, "1B1", "1B1 1W1", r"rank 1, step 7, 1W1: .* has brought the gradients of the weights"),
        (0, "[0RB1! 0SF1-]", "0RB1", r"rank 0, step 5, 0RB1: messages, and nothing else, stand in an P2PBatch"),
        (0, "[0SF0 0RB0]", "[0SF0 0RB0 0RG]", r"rank 0, step 1, 0RG: messages, and nothing else, stand in an P2PBatch"),
        (1, "[1SB1]", "[1SB1 1SF1]", r"rank 1, step 7, 1SF1: there is no stage 2; the stages are 0 to 1"),
        (0, "[0SF0", "[1SF0", r"rank 0, step 1, 1SF0: stage 1 is not on rank 0"),
        (0, "[0SF0", "[7SF0", r"rank 0, step 1, 7SF0: stage 7 is not on rank 0"),
        (1, "[1SB1]", "[1SB1 1SB1!]", r"rank 1, step 7, 1SB1: receives are awaited, sends are released"),
        (1, "[1SB1]", "[1SB1 1RF1-]", r"rank 1, step 7, 1RF1: receives are awaited, sends are released"),
        (0, "0SF1-", "0SF1- 0SF1-", r"rank 0, step 5, 0SF1: an earlier step of rank 0 has brought the release"),
        (0, "0SF1-", "0SF1- 0SF0-", r"rank 0, step 5, 0SF0: an earlier step of rank 0 has brought the release"),
        (1, "[1SB1]", "[1SB1 1SB0-]", r"rank 1, step 7, 1SB0: it is held to have left, and may not have"),
    ],
)
def test_a_broken_plan_is_named_with_rank_step_and_action_and_marked(rank: int, old: str, new: str, fault: str) -> None:
    require_marked(broken(rank, old, new), fault)


def require_marked(plan: Plan, fault: str) -> None:
    """The error names the fault, and shows its position in the grid."""
    error_text = fault_of(plan)
    assert re.match(fault, error_text)
    position = re.match(r"rank (\d), step (\d+)", error_text)
    assert position is not None
    marked = [line for line in error_text.splitlines()[1:] if ">" in line]
    assert len(marked) == 1 and marked[0].startswith(f"rank {position[1]} ")
    step = [*map(str, plan[int(position[1])]), "end"][int(position[2])]
    assert f">{step}<" in marked[0]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        # In the exchange that posts it, before anything came back.
        (
            "0F0 [0SF0 0RB0 0SF0-] 0F1 [0SF1 0RB1 0RB0!] 0B0 [0RB1!] 0B1",
            "rank 0, step 1, 0SF0: it is held to have left",
        ),
        # The gradient of microbatch 0 says nothing of the output of microbatch 1: it may have been posted before.
        (
            "0F0 [0SF0 0RB0] 0F1 [0SF1 0RB1 0RB0! 0SF1-] 0B0 [0RB1!] 0B1",
            "rank 0, step 3, 0SF1: it is held to have left",
        ),
        # One compute later, yet nothing else has come.
        (
            "0F0 [0SF0 0RB0] 0F1 [0SF1 0RB1 0RB0!] 0B0 [0SF1-] [0RB1!] 0B1",
            "rank 0, step 5, 0SF1: it is held to have left",
        ),
    ],
)
def test_a_send_released_before_it_has_left_for_certain_is_named(line: str, fault: str) -> None:
    require_marked(plan_of_text(line, GOOD[1]), fault)
    # Later than need be is no fault.
    check(plan_of_text("0F0 [0SF0 0RB0] 0F1 [0SF1 0RB1 0RB0!] 0B0 [0RB1! 0SF0-] 0B1 [0SF1-]", GOOD[1]))


def test_a_message_without_its_other_end_is_named_at_either_end() -> None:
    unsent = plan_of_text("0F0 [0SF0] 0F1", "[1RF0 1RF1 1RF0!] 1F0 [1RF1!] 1F1")
    assert fault_of(unsent).startswith("rank 1, step 0, 1RF1: its other end, 0SF1, is not in the plan")
    unread = plan_of_text("0F0 [0SF0 0RB0 0RB0!] 0B0", "[1RF0 1RF0!] 1F0 1B0 [1SB0]", "2F0 2B0")
    assert fault_of(unread).startswith("rank 1, step 2, 1B0: no step of rank 1 before it brings the gradient of the ou")
    unreceived = plan_of_text("0F0 [0SF0 0RB0 0RB0!] 0B0 [0SF0]", "[1RF0 1RF0!] 1F0 1B0 [1SB0]")
    assert fault_of(unreceived).startswith("rank 0, step 3, 0SF0: an earlier step of rank 0 has brought a send of the")


def test_a_message_within_one_rank_is_named() -> None:
    assert "stage 1 is on rank 0 too" in fault_of(plan_of_text("0F0 [0SF0 1RF0 1RF0!] 1F0"))


def test_messages_posted_in_two_orders_are_named() -> None:
    plan = plan_of_text("0F0 0F1 [0SF0 0SF1]", "[1RF1 1RF0 1RF0!] 1F0 [1RF1!] 1F1")
    fault = fault_of(plan)
    assert fault.startswith("rank 1, step 0, 1RF1: rank 0 sends 0SF0 before 0SF1, and messages of one lane match in")
    assert ">[1RF1 1RF0 1RF0!]<" in fault
    check(plan_of_text("0F0 0F1 [0SF0 0SF1]", "[1RF0 1RF1 1RF0!] 1F0 [1RF1!] 1F1"))
    # The order of the waits is the receiver's own affair.
    check(plan_of_text("0F0 0F1 [0SF0 0SF1]", "[1RF0 1RF1 1RF1!] 1F1 [1RF0!] 1F0"))


RING = (
    "[2RF0] 0F0 [0SF0 2RF0!] 2F0 [2SF0 2RB0 2RB0!] 2B0 0F1 [2SB0 0SF1 2RF1 0RB0 0RB0!] 0B0 [2RF1!] 2F1 "
    "[2SF1 2RB1 2RB1!] 2B1 [2SB1 0RB1 0RB1!] 0B1",
    "[1RF0 1RF0!] 1F0 [1SF0 3RF0 3RF0!] 3F0 3B0 [3SB0] [1RB0 1RF1 1RB0!] 1B0 [1SB0 1RF1!] 1F1 [1SF1 3RF1 3RF1!] "
    "3F1 3B1 [3SB1 1RB1 1RB1!] 1B1 [1SB1]",
)


def test_with_two_ranks_in_a_ring_messages_of_different_direction_may_be_posted_in_any_order() -> None:
    # The next rank is also the previous one: a gradient and an activation travel from rank 0 to rank 1, each by a lane
    # of its own.
    check(plan_of_text(*RING))
    for rank, old, new in ((1, "1RB0 1RF1", "1RF1 1RB0"), (0, "2SB0 0SF1", "0SF1 2SB0")):
        lines = list(RING)
        assert old in lines[rank]
        lines[rank] = lines[rank].replace(old, new)
        check(plan_of_text(*lines))


def test_in_a_ring_messages_of_two_chunks_share_a_lane_and_match_in_order() -> None:
    # 0SF1 and 2SF0 both go forward from rank 0 to rank 1.
    good = "0F0 [0SF0 2RF0] 0F1 [0SF1 2RF0!] 2F0 [2SF0]", "[1RF0 1RF0!] 1F0 [1SF0 1RF1 3RF0 1RF1!] 1F1 [3RF0!] 3F0"
    with pytest.raises(ScheduleError, match="no step of rank 0 makes the output of stage 2, microbatch 1"):
        check(plan_of_text(*good))
    whole = (
        good[0] + " [2RF1 2RF1!] 2F1 [2SF1]",
        good[1].replace("1F1 [", "1F1 [1SF1 ") + " [3RF1 3RF1!] 3F1",
    )
    check(plan_of_text(*whole))
    swapped = plan_of_text(whole[0], whole[1].replace("1RF1 3RF0", "3RF0 1RF1"))
    assert fault_of(swapped).startswith("rank 1, step 2, 3RF0: rank 0 sends 0SF1 before 2SF0")


def test_ranks_that_wait_for_each_other_are_named_as_a_circle() -> None:
    # Rank 0 wants the gradient of microbatch 0 before it goes on, rank 1 the input of microbatch 1 before that.
    circle = plan_of_text(
        "0F0 [0SF0 0RB0 0RB0!] 0B0 0F1 [0SF1 0RB1 0RB1!] 0B1",
        "[1RF0 1RF1 1RF0!] 1F0 [1RF1!] 1F1 1B0 [1SB0] 1B1 [1SB1]",
    )
    assert fault_of(circle).splitlines() == [
        "the plan never ends, its ranks wait for each other:",
        "rank 0, step 1, 0RB0: waits for 1SB0 of rank 1",
        "rank 1, step 2, 1RF1: waits for 0SF1 of rank 0",
        "step   0                 1                   2         3   4                 5      6   7      8",
        "rank 0 0F0               >[0SF0 0RB0 0RB0!]< 0B0       0F1 [0SF1 0RB1 0RB1!] 0B1    end",
        "rank 1 [1RF0 1RF1 1RF0!] 1F0                 >[1RF1!]< 1F1 1B0               [1SB0] 1B1 [1SB1] end",
    ]


def test_a_rank_stuck_after_an_earlier_message_of_the_lane_is_reported_to_wait_for_that_one() -> None:
    # 1F1 wants 0SF1, and on its lane 0SF0 comes first, which rank 0 sends too late.
    plan = plan_of_text(
        "0F0 0F1 0F2 [0SF0 0SF1 0SF2 0RB1 0RB1!] 0B1 [0RB0 0RB2 0RB0!] 0B0 [0RB2!] 0B2",
        "[1RF0 1RF1 1RF2 1RF1!] 1F1 1B1 [1RF0!] 1F0 1B0 [1RF2!] 1F2 1B2 [1SB1 1SB0 1SB2]",
    )
    check(plan)
    steps = list(plan[0])
    steps[3] = plan_of_text("[0RB1 0RB1!]")[0][0]
    steps[4:4] = [plan_of_text("[0SF0 0SF1 0SF2]")[0][0]]
    error_text = fault_of((tuple(steps), plan[1]))
    assert "rank 0, step 3, 0RB1: waits for 1SB1 of rank 1" in error_text
    assert "rank 1, step 0, 1RF1: waits for 0SF0 of rank 0" in error_text


def test_a_rank_that_only_waits_for_a_circle_is_not_named_as_part_of_it() -> None:
    plan = [list(steps) for steps in add_messages(one_f_one_b(pp=4, microbatches=6))]
    for rank, steps in enumerate(plan):
        # Rank 2 hands its outputs on only once it has the gradient of the first.
        if rank == 2:
            place = next(i for i, step in enumerate(steps) if "2SF0" in str(step))
            wait = next(i for i, step in enumerate(steps) if "2RB0!" in str(step))
            step = steps[place]
            assert isinstance(step, P2PBatch) and step.posted[0].kind is Kind.SEND_FORWARD
            steps[place] = P2PBatch(step.posted[1:], step.awaited)
            steps.insert(wait + 1, P2PBatch(step.posted[:1]))
            later = steps[wait]
            assert isinstance(later, P2PBatch)
            sends = [message for message in later.posted if message.kind in SENDS]
            steps[wait] = P2PBatch(tuple(m for m in later.posted if m not in sends), later.awaited)
            steps.insert(wait + 2, P2PBatch(tuple(sends)))
    named = re.findall(r"^rank (\d), step \d+, \S+: waits", fault_of(tuple(map(tuple, plan))), re.MULTILINE)
    assert sorted(named) == ["2", "3"]


def test_of_a_long_plan_only_the_part_around_the_fault_is_shown() -> None:
    plan = list(add_messages(one_f_one_b(pp=2, microbatches=100)))
    plan[1] = tuple(step for step in plan[1] if str(step) != "1B50")
    lines = fault_of(tuple(plan)).splitlines()
    assert len(lines) == 4
    assert "1SB50" in lines[0]
    assert ">[1SB50 1RF51! 1SB49-]<" in lines[3]
    assert max(map(len, lines)) < 600


# -- check against a slower, simpler one


def change(plan: Plan, how: str, rank: int, at: int) -> Plan:
    steps = list(plan[rank % len(plan)])
    at %= len(steps)
    step, following = steps[at], steps[at + 2] if at + 2 < len(steps) else None
    if how == "drop":
        del steps[at]
    elif how == "repeat":
        steps.insert(at, step)
    elif how == "move":
        steps.insert(at + 1, steps.pop(at))
    elif how == "delay":
        steps.insert(at + 2, steps.pop(at))
    elif isinstance(step, P2PBatch):
        posted, awaited, released = step.posted, step.awaited, step.released
        if how == "lose":
            steps[at] = P2PBatch(posted[1:], awaited, released)
        elif how == "forget":
            steps[at] = P2PBatch(posted, awaited[1:], released[1:])
        elif how == "turn":
            steps[at] = P2PBatch(posted[::-1], awaited, released)
        elif how == "hurry" and posted:
            steps[at] = P2PBatch(posted, awaited, released + posted[:1])
        elif isinstance(following, P2PBatch) and how == "join":
            posted, awaited = posted + following.posted, awaited + following.awaited
            steps[at] = P2PBatch(posted, awaited, released + following.released)
            del steps[at + 2]
        elif isinstance(following, P2PBatch) and how == "wait":
            # What the next exchange awaits is awaited here; what is posted there to be awaited is posted here too.
            early = tuple(m for m in following.posted if m in following.awaited)
            steps[at] = P2PBatch(posted + early, awaited + following.awaited, released)
            steps[at + 2] = P2PBatch(tuple(m for m in following.posted if m not in early), (), following.released)
        elif isinstance(following, P2PBatch) and how == "late":
            sends = tuple(m for m in posted if m.kind in SENDS)
            steps[at] = P2PBatch(tuple(m for m in posted if m not in sends), awaited, released)
            steps[at + 2] = P2PBatch(following.posted[:1] + sends + following.posted[1:], *parts(following))
        elif isinstance(following, P2PBatch) and how == "release":
            steps[at] = P2PBatch(posted, awaited, released + following.released)
            steps[at + 2] = P2PBatch(following.posted, following.awaited)
    lines = list(plan)
    lines[rank % len(plan)] = tuple(steps)
    return tuple(lines)


def parts(exchange: P2PBatch) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    return exchange.awaited, exchange.released


# Those that can end in a circle or in a good plan more often than those that are found at a glance.
CHANGES = [
    "drop",
    "repeat",
    "move",
    "delay",
    "lose",
    "forget",
    "turn",
    "hurry",
    *["join", "wait", "late", "release"] * 3,
]


@settings(max_examples=400, deadline=None)
@given(
    pp=st.integers(2, 4),
    microbatches=st.integers(2, 4),
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
def test_rank_r_saves_min_of_p_minus_r_and_m_activations(pp: int, microbatches: int) -> None:
    timeline = play(one_f_one_b(pp=pp, microbatches=microbatches))
    assert timeline.peak_activations == tuple(min(pp - rank, microbatches) for rank in range(pp))


def test_forward_only_saves_one_activation_and_all_forwards_first_saves_all() -> None:
    assert play(forward_chunks(ranks=tuple(range(3)), microbatches=7)).peak_activations == (1, 1, 1)
    all_first = plan_of_text("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")
    assert play(all_first).peak_activations == (3, 3)


def test_of_a_split_backward_the_weight_half_frees_the_activation() -> None:
    assert play(plan_of_text("0F0 0I0 0F1 0I1 0W0 0W1")).peak_activations == (2,)
    assert play(plan_of_text("0F0 0I0 0W0 0F1 0I1 0W1")).peak_activations == (1,)


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


def test_messages_overlap_with_computes() -> None:
    order: Order = forward_chunks(ranks=tuple(range(2)), microbatches=2)
    costs = Costs(forward=1, message=10)
    # 0F0 ends at 1 and 0F1 at 2; 1F0 starts at 11, 1F1 at 12.
    assert play(order, costs).makespan == 13
    # A lane carries one message at a time: the second arrives at 21.
    assert play(add_messages(order), costs).makespan == 22


def test_a_receive_that_is_posted_late_lands_late() -> None:
    sends = "0F0 [0SF0] 0F1 [0SF1]"
    costs = Costs(forward=1, message=2)
    # 0SF0 arrives at 3 and 0SF1 at 5, after it on the lane.
    ahead = play(plan_of_text(sends, "[1RF0 1RF1 1RF0!] 1F0 2F0 [1RF1!] 1F1 2F1"), costs)
    assert [span.start for span in ahead.spans[1]] == [3, 4, 5, 6]
    # Posted at 5, when the rank is through with microbatch 0, 0SF1 takes until 7.
    late = play(plan_of_text(sends, "[1RF0 1RF0!] 1F0 2F0 [1RF1 1RF1!] 1F1 2F1"), costs)
    assert [span.start for span in late.spans[1]] == [3, 4, 7, 8]


@pytest.mark.parametrize("sender", [0, 1])
def test_a_send_does_not_hold_its_rank(sender: int) -> None:
    fast = "0F0 [0SF0] 0F1 [0SF1] 0F2 [0SF2]"
    slow = "[1RF0 1RF0!] 1F0 2F0 [1RF1 1RF1!] 1F1 2F1 [1RF2 1RF2!] 1F2 2F2"
    timeline = play(plan_of_text(*((fast, slow) if sender == 0 else (slow, fast))), Costs(forward=1, message=0.5))
    assert [span.start for span in timeline.spans[sender]] == [0, 1, 2]
    # The receives are posted at 0, 3.5 and 6.
    assert [span.start for span in timeline.spans[1 - sender]] == [1.5, 2.5, 4, 5, 6.5, 7.5]


def test_the_timeline_of_a_plan_has_the_computes_alone() -> None:
    order = gpipe(pp=2, chunks=2, microbatches=2)
    of_plan, of_order = play(lower(order).plan), play(order)
    assert [[span.action for span in spans] for spans in of_plan.spans] == [list(actions) for actions in order]
    assert of_plan == of_order


def test_dgrad_and_wgrad_have_their_own_costs() -> None:
    timeline = play(plan_of_text("0F0 0I0 0W0"), Costs(forward=1, backward_input=4, backward_weight=16))
    assert [(span.start, span.end) for span in timeline.spans[0]] == [(0, 1), (1, 5), (5, 21)]
    assert timeline.bubble == 0


def test_stages_may_have_costs_of_their_own() -> None:
    order = one_f_one_b(pp=2, microbatches=2)
    timeline = play(order, [Costs(forward=1, backward=3), Costs(forward=10, backward=100)])
    # The second rank computes without a gap once its first input is there; then the last gradient goes back.
    assert [(span.start, span.end) for span in timeline.spans[1]] == [(1, 11), (11, 111), (111, 121), (121, 221)]
    assert [(span.start, span.end) for span in timeline.spans[0]] == [(0, 1), (1, 2), (111, 114), (221, 224)]
    alike = Costs(forward=2, backward=5, message=0.5)
    assert play(order, [alike, alike]) == play(order, alike)
    with pytest.raises(AssertionError, match="costs of 1 stages for a plan of 2"):
        play(order, [alike])


def test_an_order_that_cannot_end_is_named() -> None:
    with pytest.raises(ScheduleError, match="rank 0, step 1, 0B0: waits for 1B0 of rank 1\nrank 1, step 0, 1F1: waits"):
        play(plan_of_text("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"))


def test_costs_that_are_none_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"cost backward \(-1\) must .* 0; the cost message \(nan\) must"):
        Costs(backward=-1, message=float("nan"))
    with pytest.raises(ValueError, match=r"cost forward \(0\) must be above 0"):
        Costs(forward=0)
