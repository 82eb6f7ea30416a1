"""Passes that turn an order of computes into the full plan that a rank executes.

Between `schedule`, which knows only computes, and the runtime, which does nothing that its plan does not name.

Note: what lies between two computes is one batch. A rank sends what it has just made and receives what it needs next
in a single Exchange. Two neighbours that each have something for the other would otherwise both wait in their send for
the other's receive, or, at pp 2, where the next and the previous rank are the same one, match each other's messages in
the wrong order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from lightning_megatron.pipeline.schedule import Action, Kind, Order, ScheduleError


@dataclass(frozen=True, slots=True)
class Exchange:
    """The messages of one rank between two computes, launched as one batch; the rank goes on when all are complete.

    A message names the stage at its own end: `1SF0` is sent by stage 1 and arrives as `2RF0` at stage 2; `1SB0` is the
    gradient of stage 1's input and arrives as `0RB0` at stage 0.
    """

    messages: tuple[Action, ...]

    def __str__(self) -> str:
        return "[" + " ".join(map(str, self.messages)) + "]"


Step = Action | Exchange
Plan = tuple[tuple[Step, ...], ...]
"""The steps of every pp rank. An Order is the special case without messages."""


MessageKey = tuple[bool, int, int]
"""Whether a message goes forward, the stage that receives it, its microbatch."""

_OTHER_END = {
    Kind.SEND_FORWARD: Kind.RECV_FORWARD,
    Kind.RECV_FORWARD: Kind.SEND_FORWARD,
    Kind.SEND_BACKWARD: Kind.RECV_BACKWARD,
    Kind.RECV_BACKWARD: Kind.SEND_BACKWARD,
}

# From the stage that a message names to the one at the other end.
_TO_PEER = {Kind.SEND_FORWARD: 1, Kind.RECV_FORWARD: -1, Kind.SEND_BACKWARD: -1, Kind.RECV_BACKWARD: 1}

# Whether a message goes forward, and from the stage that it names to the one that receives it.
_TO_RECEIVER = {
    Kind.SEND_FORWARD: (True, 1),
    Kind.RECV_FORWARD: (True, 0),
    Kind.SEND_BACKWARD: (False, -1),
    Kind.RECV_BACKWARD: (False, 0),
}


def rank_of_stage(plan: Plan) -> tuple[int, ...]:
    """The pp rank that holds each stage, read off the plan or order itself: index it with a stage.

    Raises ScheduleError when two ranks compute for one stage, or no rank for a stage below the highest.
    """
    ranks: dict[int, int] = {}
    for rank, steps in enumerate(plan):
        for stage in {step.stage for step in steps if isinstance(step, Action)}:
            if stage in ranks:
                raise ScheduleError(f"stage {stage} is on ranks {ranks[stage]} and {rank}; a stage has one rank")
            ranks[stage] = rank
    absent = sorted(set(range(max(ranks, default=-1) + 1)) - set(ranks))
    if absent:
        raise ScheduleError(f"stages {absent} are on no rank, though stage {max(ranks)} is; count stages without gaps")
    return tuple(ranks[stage] for stage in range(len(ranks)))


def peer_stage(message: Action) -> int:
    """The stage at the other end of a message."""
    return message.stage + _TO_PEER[message.kind]


def other_end(message: Action) -> Action:
    """The receive of a send, the send of a receive."""
    return Action(_OTHER_END[message.kind], peer_stage(message), message.microbatch)


def message_key(message: Action) -> MessageKey:
    """What both ends of a message have in common, and no other message of a plan has."""
    is_forward, to_receiver = _TO_RECEIVER[message.kind]
    return is_forward, message.stage + to_receiver, message.microbatch


def add_messages(order: Order) -> Plan:
    """The plan of an order: each send right after the compute that makes it, each receive right before the compute that
    needs it, all between two computes joined into one Exchange.

    Two neighbouring stages on one rank hand over without a message.
    """
    ranks = rank_of_stage(order)
    return tuple(_with_messages(rank, actions, ranks) for rank, actions in enumerate(order))


@lru_cache(maxsize=64)
def steps_of_rank(make: Callable[..., Order], pp: int, microbatches: int, rank: int) -> tuple[Step, ...]:
    """The steps of one rank under the order that `make(pp=, microbatches=)` gives; kept, because every step asks."""
    return add_messages(make(pp=pp, microbatches=microbatches))[rank]


def _with_messages(rank: int, actions: tuple[Action, ...], ranks: tuple[int, ...]) -> tuple[Step, ...]:
    has_previous = [stage > 0 and ranks[stage - 1] != rank for stage in range(len(ranks))]
    has_next = [stage < len(ranks) - 1 and ranks[stage + 1] != rank for stage in range(len(ranks))]
    steps: list[Step] = []
    messages: list[Action] = []
    for action in actions:
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        is_forward = kind is Kind.FORWARD
        is_backward = kind is Kind.BACKWARD or kind is Kind.BACKWARD_INPUT
        if is_forward and has_previous[stage]:
            messages.append(Action(Kind.RECV_FORWARD, stage, microbatch))
        elif is_backward and has_next[stage]:
            messages.append(Action(Kind.RECV_BACKWARD, stage, microbatch))
        if messages:
            steps.append(Exchange(tuple(messages)))
            messages = []
        steps.append(action)
        if is_forward and has_next[stage]:
            messages.append(Action(Kind.SEND_FORWARD, stage, microbatch))
        elif is_backward and has_previous[stage]:
            messages.append(Action(Kind.SEND_BACKWARD, stage, microbatch))
    if messages:
        steps.append(Exchange(tuple(messages)))
    return tuple(steps)
