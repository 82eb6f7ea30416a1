"""What lowering adds to an order, message by message."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_megatron.pipeline.lower import (
    SENDS,
    P2PBatch,
    Plan,
    add_gathers,
    add_messages,
    add_reductions,
    hops,
    lane_of,
    lower,
    message_key,
    other_end,
    peer_stage,
    rank_of_stage,
)
from lightning_megatron.pipeline.registry import SCHEDULES, ScheduleName, order_of, schedule_faults
from lightning_megatron.pipeline.schedule import (
    COMPUTES,
    WHOLE_STAGE,
    Action,
    Kind,
    Order,
    ScheduleError,
    backward_chunks,
    forward_chunks,
)
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.schedules.one_f_one_b import one_f_one_b
from lightning_megatron.pipeline.simulate import check
from tests.pipeline.queues import is_left_in_time, order_of_text, plan_of_text, run, text_of


@st.composite
def schedules(draw: st.DrawFn, max_pp: int = 6, max_microbatches: int = 12) -> Schedule:
    """Any schedule without faults."""
    name: Any = draw(st.sampled_from(list(SCHEDULES)))
    pp, microbatches = draw(st.integers(1, max_pp)), draw(st.integers(1, max_microbatches))
    chunks = SCHEDULES[name].max_chunks or draw(st.integers(1, 3))
    extra = draw(st.integers(0, 2)) if name == "interleaved" else 0
    schedule = Schedule(
        name=name,
        pp=pp,
        chunks=chunks,
        microbatches=microbatches,
        group_size=pp + extra if extra else 0,
        is_overlapped=draw(st.booleans()),
    )
    assume(not schedule_faults(schedule))
    return schedule


def exchanges(plan: Plan) -> list[P2PBatch]:
    return [step for steps in plan for step in steps if isinstance(step, P2PBatch)]


# -- line by line


def test_receives_of_one_f_one_b_are_posted_a_compute_ahead_and_sends_released_a_round_trip_later() -> None:
    assert text_of(add_messages(one_f_one_b(pp=2, microbatches=3))) == [
        "0F0 [0SF0 0RB0] 0F1 [0SF1 0RB0! 0SF0-] 0B0 [0RB1] 0F2 [0SF2 0RB2 0RB1! 0SF1-] 0B1 [0RB2! 0SF2-] 0B2",
        "[1RF0 1RF0!] 1F0 [1RF1] 1B0 [1SB0 1RF1!] 1F1 [1RF2] 1B1 [1SB1 1RF2! 1SB0-] 1F2 1B2 [1SB2]",
    ]


def test_forward_only_has_no_backward_messages() -> None:
    assert text_of(add_messages(forward_chunks(ranks=tuple(range(3)), microbatches=2))) == [
        "0F0 [0SF0] 0F1 [0SF1]",
        "[1RF0 1RF1 1RF0!] 1F0 [1SF0 1RF1!] 1F1 [1SF1]",
        "[2RF0 2RF1 2RF0!] 2F0 [2RF1!] 2F1",
    ]


def test_backward_only_has_no_forward_messages() -> None:
    assert text_of(add_messages(backward_chunks(ranks=(0, 1, 0), microbatches=1))) == [
        "[0RB0] 2B0 [2SB0 0RB0! 2SB0-] 0B0",
        "[1RB0 1RB0!] 1B0 [1SB0]",
    ]


def test_one_rank_has_no_messages() -> None:
    order = one_f_one_b(pp=1, microbatches=3)
    assert add_messages(order) == order
    order = forward_chunks(ranks=(0, 0, 0), microbatches=2)
    assert add_messages(order) == order


def test_neighbouring_stages_on_one_rank_hand_over_without_a_message() -> None:
    # The V placement: rank 0 holds the first and the last stage, rank 1 the two between.
    order = order_of_text("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    assert text_of(add_messages(order)) == [
        "[3RF0] 0F0 [0SF0 3RF0! 0SF0-] 3F0 [0RB0] 3B0 [3SB0 0RB0! 3SB0-] 0B0",
        "[1RF0 1RF0!] 1F0 2F0 [2SF0 2RB0 2RB0! 2SF0-] 2B0 1B0 [1SB0]",
    ]


def test_in_a_ring_of_two_the_last_stage_of_a_round_sends_to_the_first_rank() -> None:
    order = order_of_text("0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0")
    assert rank_of_stage(order) == (0, 1, 0, 1)
    assert hops((0, 1, 0, 1)) == [(0, 1), (1, 0)]
    # `1RF0 3RF0`: one lane, so the later one is posted no earlier than the other, and both are ahead.
    assert text_of(add_messages(order)) == [
        "[2RF0] 0F0 [0SF0 2RF0! 0SF0-] 2F0 [2SF0 2RB0 0RB0 2RB0! 2SF0-] 2B0 [2SB0 0RB0! 2SB0-] 0B0",
        "[1RF0 3RF0 1RF0!] 1F0 [1SF0 3RF0! 1SF0-] 3F0 [1RB0] 3B0 [3SB0 1RB0! 3SB0-] 1B0 [1SB0]",
    ]


def test_of_a_split_backward_the_input_half_alone_receives_and_sends() -> None:
    assert text_of(add_messages(order_of_text("0F0 0I0 0W0", "1F0 1I0 1W0"))) == [
        "0F0 [0SF0 0RB0 0RB0! 0SF0-] 0I0 0W0",
        "[1RF0 1RF0!] 1F0 1I0 [1SB0] 1W0",
    ]


def test_a_receive_that_its_lane_puts_before_an_earlier_one_is_posted_with_it() -> None:
    # Rank 0 makes 0F1 first, and rank 1 wants it last: its receive must be posted before the others all the same.
    assert text_of(add_messages(order_of_text("0F1 0F0 0F2", "1F0 1F2 1F1"))) == [
        "0F1 [0SF1] 0F0 [0SF0] 0F2 [0SF2]",
        "[1RF1 1RF0 1RF2 1RF0!] 1F0 [1RF2!] 1F2 [1RF1!] 1F1",
    ]


def test_a_gradient_is_not_received_before_its_shape_is_known() -> None:
    [first, _] = text_of(add_messages(one_f_one_b(pp=2, microbatches=3), ahead=9))
    assert first == "0F0 [0SF0 0RB0] 0F1 [0SF1 0RB1 0RB0! 0SF0-] 0B0 0F2 [0SF2 0RB2 0RB1! 0SF1-] 0B1 [0RB2! 0SF2-] 0B2"


def test_without_any_lead_a_receive_is_posted_where_it_is_awaited() -> None:
    assert text_of(add_messages(one_f_one_b(pp=2, microbatches=2), ahead=0)) == [
        "0F0 [0SF0] 0F1 [0SF1 0RB0 0RB0! 0SF0-] 0B0 [0RB1 0RB1! 0SF1-] 0B1",
        "[1RF0 1RF0!] 1F0 1B0 [1SB0 1RF1 1RF1!] 1F1 1B1 [1SB1]",
    ]


# -- of every schedule


@settings(max_examples=200, deadline=None)
@given(schedule=schedules())
def test_every_schedule_passes_the_check_and_keeps_its_computes(schedule: Schedule) -> None:
    order = order_of(schedule)
    program = lower(order)
    check(program.plan)
    assert program.ranks == rank_of_stage(order)
    computes = [[s for s in steps if isinstance(s, Action) and s.kind in COMPUTES] for steps in program.plan]
    assert tuple(map(tuple, computes)) == order


@settings(max_examples=100, deadline=None)
@given(schedule=schedules(), ahead=st.integers(0, 5))
def test_receives_posted_any_number_of_computes_ahead_pass_the_check(schedule: Schedule, ahead: int) -> None:
    check(add_messages(order_of(schedule), ahead=ahead))


@st.composite
def possible_orders(draw: st.DrawFn) -> Order:
    """Any order in which ranks could compute: stages on any rank, and always some compute that is ready next."""
    num_stages = draw(st.integers(1, 6))
    placed = draw(st.lists(st.integers(0, 3), min_size=num_stages, max_size=num_stages))
    ranks = [sorted(set(placed)).index(rank) for rank in placed]
    microbatches, is_split = draw(st.integers(1, 4)), draw(st.booleans())
    pick = draw(st.randoms(use_true_random=False))
    order: list[list[Action]] = [[] for _ in set(ranks)]
    ready = [Action(Kind.FORWARD, 0, m) for m in range(microbatches)]
    while ready:
        action = ready.pop(pick.randrange(len(ready)))
        kind, stage, m = action.kind, action.stage, action.microbatch
        order[ranks[stage]].append(action)
        if kind is Kind.FORWARD and stage < num_stages - 1:
            ready.append(Action(Kind.FORWARD, stage + 1, m))
        elif kind is Kind.FORWARD:
            ready.append(Action(Kind.BACKWARD_INPUT if is_split else Kind.BACKWARD, stage, m))
        elif kind is not Kind.BACKWARD_WEIGHT:
            ready += [Action(kind, stage - 1, m)] if stage > 0 else []
            ready += [Action(Kind.BACKWARD_WEIGHT, stage, m)] if is_split else []
    return tuple(map(tuple, order))


@settings(max_examples=200, deadline=None)
@given(order=possible_orders(), ahead=st.integers(0, 5))
def test_any_order_that_is_possible_at_all_passes_the_check(order: Order, ahead: int) -> None:
    plan = add_messages(order, ahead=ahead)
    check(plan)


@settings(max_examples=150, deadline=None)
@given(schedule=schedules())
def test_every_hand_over_between_ranks_is_one_send_and_one_receive_posted_once_and_awaited_once(
    schedule: Schedule,
) -> None:
    order = order_of(schedule)
    ranks = rank_of_stage(order)
    plan = add_messages(order)
    posted = [message for exchange in exchanges(plan) for message in exchange.posted]
    num_hand_overs = sum(a != b for a, b in pairwise(ranks)) * schedule.microbatches
    assert len(posted) == len(set(posted)) == 2 * 2 * num_hand_overs
    assert {other_end(message) for message in posted} == set(posted)
    assert set(Counter(map(message_key, posted)).values()) <= {2}
    awaited = [message for exchange in exchanges(plan) for message in exchange.awaited]
    assert len(awaited) == len(set(awaited))
    assert set(awaited) == {message for message in posted if message.kind not in SENDS}
    released = [message for exchange in exchanges(plan) for message in exchange.released]
    assert len(released) == len(set(released)) and set(released) <= {m for m in posted if m.kind in SENDS}


@settings(max_examples=100, deadline=None)
@given(schedule=schedules())
def test_both_ends_of_a_lane_post_in_one_order_that_in_which_the_sender_computes(schedule: Schedule) -> None:
    order = order_of(schedule)
    ranks = rank_of_stage(order)
    plan = add_messages(order)
    for steps, actions in zip(plan, order, strict=True):
        sends = [m for e in exchanges((steps,)) for m in e.posted if m.kind in SENDS]
        made = [(a.stage, a.microbatch, a.kind is Kind.FORWARD) for a in actions if a.kind is not Kind.BACKWARD_WEIGHT]
        sent = [(m.stage, m.microbatch, m.kind is Kind.SEND_FORWARD) for m in sends]
        assert sent == [each for each in made if each in set(sent)]
        for lane in {lane_of(send, ranks) for send in sends}:
            there = [m for e in exchanges((plan[lane[1]],)) for m in e.posted if lane_of(m, ranks) == lane]
            assert [m for m in map(other_end, sends) if lane_of(m, ranks) == lane] == [
                m for m in there if m.kind not in SENDS
            ]


@settings(max_examples=100, deadline=None)
@given(schedule=schedules())
def test_a_receive_is_awaited_right_before_its_compute_and_a_send_posted_right_after_its_own(
    schedule: Schedule,
) -> None:
    for steps in add_messages(order_of(schedule)):
        for place, step in enumerate(steps):
            if not isinstance(step, P2PBatch):
                continue
            for receive in step.awaited:
                reader = steps[place + 1]
                assert isinstance(reader, Action)
                assert (reader.stage, reader.microbatch) == (receive.stage, receive.microbatch)
                assert (reader.kind is Kind.FORWARD) == (receive.kind is Kind.RECV_FORWARD)
            for send in (message for message in step.posted if message.kind in SENDS):
                maker = steps[place - 1]
                assert isinstance(maker, Action)
                assert (maker.stage, maker.microbatch) == (send.stage, send.microbatch)
                assert (maker.kind is Kind.FORWARD) == (send.kind is Kind.SEND_FORWARD)


@settings(max_examples=150, deadline=None)
@given(schedule=schedules())
def test_receives_are_posted_ahead_of_their_wait_unless_a_gradient_has_no_shape_yet(schedule: Schedule) -> None:
    for steps in add_messages(order_of(schedule)):
        at = {
            message: place for place, step in enumerate(steps) if isinstance(step, P2PBatch) for message in step.posted
        }
        for place, step in enumerate(steps):
            for receive in step.awaited if isinstance(step, P2PBatch) else ():
                between = [s for s in steps[at[receive] : place] if isinstance(s, Action)]
                before = [s for s in steps[:place] if isinstance(s, Action)]
                is_fresh = receive.kind is Kind.RECV_BACKWARD and before[-1].kind is Kind.FORWARD
                assert between or not before or is_fresh


@settings(max_examples=100, deadline=None)
@given(schedule=schedules())
def test_two_exchanges_never_follow_each_other(schedule: Schedule) -> None:
    for steps in add_messages(order_of(schedule)):
        is_exchange = [isinstance(step, P2PBatch) for step in steps]
        assert not any(first and second for first, second in pairwise(is_exchange))


# -- releases


@settings(max_examples=60, deadline=None)
@given(schedule=schedules(max_pp=4, max_microbatches=4))
def test_whatever_is_released_has_left_however_slow_its_receiver_is(schedule: Schedule) -> None:
    plan = add_messages(order_of(schedule))
    assert all(is_left_in_time(plan, rank) for rank in range(len(plan)))


def test_a_release_one_exchange_too_early_may_come_before_the_message_has_left() -> None:
    # What the last test looks for: rank 1 may be so slow that it has not received the send of the same exchange.
    assert is_left_in_time(plan_of_text("0F0 [0SF0 0RB0 0RB0! 0SF0-] 0B0", "[1RF0 1RF0!] 1F0 1B0 [1SB0]"), 0)
    plan = plan_of_text("0F0 [0SF0 0RB0 0SF0-] [0RB0!] 0B0", "[1RF0 1RF0!] 1F0 1B0 [1SB0]")
    assert run(plan)[0] == [4, 4]
    assert not is_left_in_time(plan, 0)


@pytest.mark.parametrize("name", [name for name in list(SCHEDULES) if name != "gpipe"])
def test_however_many_microbatches_few_sends_are_held_to_the_end(name: ScheduleName) -> None:
    for pp in (2, 3, 6):
        chunks = {"zb_v": 2, "dualpipe_v": 2, "interleaved": 3}.get(name, 1)
        held = []
        for microbatches in (24, 48):
            schedule = Schedule(name=name, pp=pp, chunks=chunks, microbatches=microbatches)
            held.append(most_held(add_messages(order_of(schedule))))
        # As many as are under way in the pipeline: both ends of a warm-up.
        assert held[0] == held[1]
        assert held[0] <= 4 * pp * chunks


def most_held(plan: Plan) -> int:
    """The most sends that a rank has posted and not released at one time."""
    most = 0
    for steps in plan:
        held = 0
        for exchange in exchanges((steps,)):
            held += sum(message.kind in SENDS for message in exchange.posted)
            most = max(most, held)
            held -= len(exchange.released)
    return most


def test_of_all_forwards_first_the_forward_sends_are_released_by_the_gradients() -> None:
    plan = add_messages(order_of(Schedule(name="gpipe", pp=3, chunks=1, microbatches=5)))
    kinds = [message.kind for exchange in exchanges(plan) for message in exchange.released]
    assert Counter(kinds) == {Kind.SEND_FORWARD: 2 * 5}


# -- reductions and gathers


@settings(max_examples=100, deadline=None)
@given(schedule=schedules())
def test_each_stage_is_reduced_once_right_after_its_last_backward_and_gathered_once_right_before_its_first_forward(
    schedule: Schedule,
) -> None:
    messages = add_messages(order_of(schedule))
    plan = add_gathers(add_reductions(messages))
    assert plan == add_reductions(add_gathers(messages))
    stage_actions = [
        step for steps in plan for step in steps if isinstance(step, Action) and step.microbatch == WHOLE_STAGE
    ]
    num_stages = schedule.pp * schedule.chunks
    assert Counter(map(str, stage_actions)) == Counter(
        f"{stage}{kind}" for stage in range(num_stages) for kind in ("RG", "GP")
    )
    for steps, bare in zip(plan, messages, strict=True):
        assert tuple(step for step in steps if step not in stage_actions) == bare
        for index, step in enumerate(steps):
            if not isinstance(step, Action) or step not in stage_actions:
                continue
            kinds = {Kind.FORWARD} if step.kind is Kind.GATHER_PARAMS else {Kind.BACKWARD, Kind.BACKWARD_WEIGHT}
            computes = [s for s in bare if isinstance(s, Action) and s.stage == step.stage and s.kind in kinds]
            if step.kind is Kind.GATHER_PARAMS:
                assert steps[index + 1] == computes[0]
            else:
                assert steps[index - 1] == computes[-1]


def test_a_plan_without_backwards_reduces_nothing() -> None:
    plan = add_messages(forward_chunks(ranks=tuple(range(2)), microbatches=2))
    assert add_reductions(plan) == plan
    assert [
        str(steps[0]) for steps in add_gathers(add_messages(forward_chunks(ranks=tuple(range(1)), microbatches=2)))
    ] == ["0GP"]


def test_lowering_adds_messages_gathers_and_reductions() -> None:
    order = order_of(Schedule(name="zb_v", pp=2, chunks=2, microbatches=1))
    assert text_of(lower(order).plan) == [
        "[1RF0 1RF0!] 1GP 1F0 2GP 2F0 [2SF0 2RB0 2RB0! 2SF0-] 2I0 2W0 2RG 1I0 [1SB0] 1W0 1RG",
        "[3RF0] 0GP 0F0 [0SF0 3RF0! 0SF0-] 3GP 3F0 3I0 [3SB0 0RB0] 3W0 3RG [0RB0! 3SB0-] 0I0 0W0 0RG",
    ]


# -- the parts


@pytest.mark.parametrize("kind", [Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD])
def test_both_ends_of_a_message_agree_on_its_key_and_name_each_other(kind: Kind) -> None:
    message = Action(kind, 3, 7)
    end = other_end(message)
    assert message_key(end) == message_key(message)
    assert other_end(end) == message
    assert peer_stage(message) == end.stage != message.stage
    ranks = (5, 6, 7, 8, 9)
    assert lane_of(end, ranks) == lane_of(message, ranks)
    assert (
        lane_of(message, ranks)[:2]
        == {
            Kind.SEND_FORWARD: (8, 9),
            Kind.RECV_FORWARD: (7, 8),
            Kind.SEND_BACKWARD: (8, 7),
            Kind.RECV_BACKWARD: (9, 8),
        }[kind]
    )


def test_no_two_messages_of_a_plan_share_a_key() -> None:
    sends = [Action(kind, stage, m) for kind in SENDS for stage in range(40) for m in (0, 1, 39, 10**6)]
    assert len(set(map(message_key, sends))) == len(sends)


def test_a_stage_on_two_ranks_and_a_gap_between_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match="stage 0 is on ranks 0 and 1"):
        add_messages(order_of_text("0F0", "0F1"))
    with pytest.raises(ScheduleError, match=r"stages \[1\] are on no rank, though stage 2 is"):
        add_messages(order_of_text("0F0", "2F0"))


def test_an_order_that_cannot_run_is_lowered_for_the_check_to_refuse() -> None:
    # The gradient of microbatch 1 is wanted before the forward of 0, whose gradient comes first on its lane.
    order: Order = order_of_text("0F1 0B1 0F0 0B0", "1F0 1F1 1B0 1B1")
    with pytest.raises(ScheduleError):
        check(add_messages(order))


def test_what_no_stage_reads_is_sent_all_the_same_for_the_check_to_refuse() -> None:
    plan = add_messages(order_of_text("0F0 0F1", "1F1"))
    assert text_of(plan) == ["0F0 [0SF0] 0F1 [0SF1]", "[1RF1 1RF1!] 1F1"]
    with pytest.raises(ScheduleError, match="rank 1, step 2, the end: no step of rank 1 makes the output of stage 1"):
        check(plan)
