"""What lowering adds to an order, message by message."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.pipeline.lower import (
    Exchange,
    add_messages,
    message_key,
    other_end,
    peer_stage,
    rank_of_stage,
)
from lightning_megatron.pipeline.schedule import (
    Action,
    Kind,
    Order,
    ScheduleError,
    forward_only,
    one_f_one_b,
)

KINDS = {kind.value: kind for kind in Kind}


def order_of(*lines: str) -> Order:
    """An order from its text: `0F0 0B0` for each rank."""
    return tuple(
        tuple(
            Action(KINDS[kind], int(stage), int(microbatch))
            for stage, kind, microbatch in re.findall(r"(\d+)([A-Z]+)(\d+)", line)
        )
        for line in lines
    )


def lines_of(order: Order) -> list[str]:
    return [" ".join(map(str, steps)) for steps in add_messages(order)]


def test_one_f_one_b_sends_what_it_made_together_with_receiving_what_it_needs() -> None:
    assert lines_of(one_f_one_b(pp=2, microbatches=3)) == [
        "0F0 [0SF0] 0F1 [0SF1 0RB0] 0B0 0F2 [0SF2 0RB1] 0B1 [0RB2] 0B2",
        "[1RF0] 1F0 1B0 [1SB0 1RF1] 1F1 1B1 [1SB1 1RF2] 1F2 1B2 [1SB2]",
    ]


def test_forward_only_has_no_backward_messages() -> None:
    assert lines_of(forward_only(pp=3, microbatches=2)) == [
        "0F0 [0SF0] 0F1 [0SF1]",
        "[1RF0] 1F0 [1SF0 1RF1] 1F1 [1SF1]",
        "[2RF0] 2F0 [2RF1] 2F1",
    ]


def test_one_rank_has_no_messages() -> None:
    order = one_f_one_b(pp=1, microbatches=3)
    assert add_messages(order) == order


def test_neighbouring_stages_on_one_rank_hand_over_without_a_message() -> None:
    # The V placement: rank 0 holds the first and the last stage, rank 1 the two between.
    order = order_of("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    assert lines_of(order) == [
        "0F0 [0SF0 3RF0] 3F0 3B0 [3SB0 0RB0] 0B0",
        "[1RF0] 1F0 2F0 [2SF0 2RB0] 2B0 1B0 [1SB0]",
    ]


def test_in_a_ring_of_two_the_last_stage_of_a_round_sends_to_the_first_rank() -> None:
    order = order_of("0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0")
    assert rank_of_stage(order) == (0, 1, 0, 1)
    assert lines_of(order) == [
        "0F0 [0SF0 2RF0] 2F0 [2SF0 2RB0] 2B0 [2SB0 0RB0] 0B0",
        "[1RF0] 1F0 [1SF0 3RF0] 3F0 3B0 [3SB0 1RB0] 1B0 [1SB0]",
    ]


def test_of_a_split_backward_the_input_half_alone_receives_and_sends() -> None:
    assert lines_of(order_of("0F0 0I0 0W0", "1F0 1I0 1W0")) == [
        "0F0 [0SF0 0RB0] 0I0 0W0",
        "[1RF0] 1F0 1I0 [1SB0] 1W0",
    ]


@settings(max_examples=150, deadline=None)
@given(pp=st.integers(1, 9), microbatches=st.integers(1, 20))
def test_every_message_has_both_ends_and_every_hand_over_a_message(pp: int, microbatches: int) -> None:
    order = one_f_one_b(pp=pp, microbatches=microbatches)
    plan = add_messages(order)
    assert tuple(tuple(step for step in steps if isinstance(step, Action)) for steps in plan) == order
    ends = [message for steps in plan for step in steps if isinstance(step, Exchange) for message in step.messages]
    assert len(ends) == len(set(ends)) == 2 * 2 * (pp - 1) * microbatches
    assert {other_end(message) for message in ends} == set(ends)
    assert set(Counter(map(message_key, ends)).values()) <= {2}


@settings(max_examples=100, deadline=None)
@given(pp=st.integers(1, 9), microbatches=st.integers(1, 20))
def test_two_exchanges_never_follow_each_other(pp: int, microbatches: int) -> None:
    for steps in add_messages(one_f_one_b(pp=pp, microbatches=microbatches)):
        is_exchange = [isinstance(step, Exchange) for step in steps]
        assert not any(first and second for first, second in pairwise(is_exchange))


@pytest.mark.parametrize("kind", [Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD])
def test_both_ends_of_a_message_agree_on_its_key_and_name_each_other(kind: Kind) -> None:
    message = Action(kind, 3, 7)
    end = other_end(message)
    assert message_key(end) == message_key(message)
    assert other_end(end) == message
    assert peer_stage(message) == end.stage != message.stage


def test_a_stage_on_two_ranks_and_a_gap_between_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match="stage 0 is on ranks 0 and 1"):
        add_messages(order_of("0F0", "0F1"))
    with pytest.raises(ScheduleError, match=r"stages \[1\] are on no rank, though stage 2 is"):
        add_messages(order_of("0F0", "2F0"))
