"""Checks of a plan without simulation: is it complete, in an order that each rank can follow, well matched.

The first half of `simulate.check`; the second half, whether ranks wait for each other for ever, needs the simulation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from lightning_megatron.pipeline.grid import PlanPosition, plan_fault
from lightning_megatron.pipeline.lower import (
    SENDS,
    Lane,
    MessageKey,
    P2PBatch,
    Plan,
    Step,
    cell_key,
    lane_of,
    message_key,
    other_end,
    peer_stage,
    rank_of_stage,
)
from lightning_megatron.pipeline.schedule import COMPUTES, MESSAGES, Action, Kind

# What a rank may hold of a stage and a microbatch, one bit each.
_OUTPUT, _INPUT, _OUTPUT_GRADIENT, _INPUT_GRADIENT, _WEIGHT_GRADIENT = (1 << bit for bit in range(5))
_SENT_OUTPUT, _SENT_GRADIENT, _POSTED_INPUT, _POSTED_GRADIENT = (1 << bit for bit in range(5, 9))
_LEFT_OUTPUT, _LEFT_GRADIENT = (1 << bit for bit in range(9, 11))
_WORDS = {
    _OUTPUT: "the output",
    _INPUT: "the input",
    _OUTPUT_GRADIENT: "the gradient of the output",
    _INPUT_GRADIENT: "the gradient of the input",
    _WEIGHT_GRADIENT: "the gradients of the weights",
    _SENT_OUTPUT: "a send of the output",
    _SENT_GRADIENT: "a send of the gradient of the input",
    _POSTED_INPUT: "a receive of the input",
    _POSTED_GRADIENT: "a receive of the gradient of the output",
    _LEFT_OUTPUT: "the release of the output",
    _LEFT_GRADIENT: "the release of the gradient of the input",
}


class _Role(Enum):
    """The part that an action has in a plan."""

    __hash__ = object.__hash__

    ALONE = "alone"
    POSTED = "posted"
    AWAITED = "awaited"
    RELEASED = "released"


# What an action needs and what it gives, of its own stage; what comes from a neighbouring stage is in `_rule_of`.
_EFFECTS: dict[tuple[_Role, Kind], tuple[int, int]] = {
    (_Role.ALONE, Kind.FORWARD): (0, _OUTPUT),
    (_Role.ALONE, Kind.BACKWARD): (_OUTPUT, _INPUT_GRADIENT | _WEIGHT_GRADIENT),
    (_Role.ALONE, Kind.BACKWARD_INPUT): (_OUTPUT, _INPUT_GRADIENT),
    (_Role.ALONE, Kind.BACKWARD_WEIGHT): (_INPUT_GRADIENT, _WEIGHT_GRADIENT),
    (_Role.ALONE, Kind.REDUCE_GRADS): (0, 0),
    (_Role.ALONE, Kind.GATHER_PARAMS): (0, 0),
    (_Role.POSTED, Kind.SEND_FORWARD): (_OUTPUT, _SENT_OUTPUT),
    (_Role.POSTED, Kind.SEND_BACKWARD): (_INPUT_GRADIENT, _SENT_GRADIENT),
    (_Role.POSTED, Kind.RECV_FORWARD): (0, _POSTED_INPUT),
    # The shape of a gradient is that of the output.
    (_Role.POSTED, Kind.RECV_BACKWARD): (_OUTPUT, _POSTED_GRADIENT),
    (_Role.AWAITED, Kind.RECV_FORWARD): (_POSTED_INPUT, _INPUT),
    (_Role.AWAITED, Kind.RECV_BACKWARD): (_POSTED_GRADIENT, _OUTPUT_GRADIENT),
    (_Role.RELEASED, Kind.SEND_FORWARD): (_SENT_OUTPUT, _LEFT_OUTPUT),
    (_Role.RELEASED, Kind.SEND_BACKWARD): (_SENT_GRADIENT, _LEFT_GRADIENT),
}


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule that holds for all microbatches of a kind of action on one stage."""

    fault: str = ""
    """Reason why the action cannot be there at all; empty: it can."""
    needs: int = 0
    gives: int = 0
    neighbour: int = 0
    """The stage on the same rank that hands over without a message."""
    neighbour_needs: int = 0


def require_consistent(plan: Plan) -> None:
    """Returns only if each rank's steps are complete, once each and after what they need, and all messages are pairs.

    Raises ScheduleError with the position otherwise.
    """
    ranks = rank_of_stage(plan)
    computes = [step for steps in plan for step in steps if isinstance(step, Action) and step.kind in COMPUTES]
    num_microbatches = 1 + max((compute.microbatch for compute in computes), default=-1)
    has_backward = any(compute.kind is not Kind.FORWARD for compute in computes)
    wanted = _OUTPUT | _INPUT_GRADIENT | _WEIGHT_GRADIENT if has_backward else _OUTPUT
    for rank in range(len(plan)):
        _require_rank(plan, rank, ranks, wanted, num_microbatches)
    _require_pairs(plan, ranks)
    _require_releases(plan, ranks)


def _require_rank(plan: Plan, rank: int, ranks: tuple[int, ...], wanted: int, num_microbatches: int) -> None:
    """Raises ScheduleError unless the steps of a rank bring what is wanted, each once and after what it needs."""
    rules: dict[tuple[_Role, Kind, int], _Rule] = {}
    done: dict[int, int] = {}
    # By stage and microbatch: what the rank holds.
    for index, step in enumerate(plan[rank]):
        for role, action in _events(step):
            rule = rules.get((role, action.kind, action.stage))
            if rule is None:
                rule = rules[role, action.kind, action.stage] = _rule_of(role, action, rank, ranks)
            cell = cell_key(action.stage, action.microbatch)
            has = done.get(cell, 0)
            missing = rule.needs & ~has
            neighbour = done.get(cell_key(rule.neighbour, action.microbatch), 0) if rule.neighbour_needs else 0
            missing_there = rule.neighbour_needs & ~neighbour
            if rule.fault or missing or missing_there or has & rule.gives:
                reason = rule.fault or _untimely(rank, rule, action, missing, missing_there)
                raise plan_fault(plan, (rank, index), str(action), reason)
            done[cell] = has | rule.gives
    for stage in (stage for stage, owner in enumerate(ranks) if owner == rank):
        for microbatch in range(num_microbatches):
            if missing := wanted & ~done.get(cell_key(stage, microbatch), 0):
                reason = f"no step of rank {rank} makes {_fact_text(missing, stage, microbatch)}"
                raise plan_fault(plan, (rank, len(plan[rank])), "the end", reason)


def _events(step: Step) -> Iterator[tuple[_Role, Action]]:
    """The actions of a step, in turn."""
    if isinstance(step, Action):
        yield _Role.ALONE, step
        return
    for message in step.posted:
        yield _Role.POSTED, message
    for message in step.awaited:
        yield _Role.AWAITED, message
    for message in step.released:
        yield _Role.RELEASED, message


def _rule_of(role: _Role, action: Action, rank: int, ranks: tuple[int, ...]) -> _Rule:
    """The rule for an action and for its like with other microbatches."""
    kind, stage = action.kind, action.stage
    if fault := _misplaced(role, action, rank, ranks):
        return _Rule(fault)
    needs, gives = _EFFECTS[role, kind]
    if kind is Kind.FORWARD and stage > 0:
        if ranks[stage - 1] == rank:
            return _Rule("", needs, gives, stage - 1, _OUTPUT)
        needs |= _INPUT
    if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and stage < len(ranks) - 1:
        if ranks[stage + 1] == rank:
            return _Rule("", needs, gives, stage + 1, _INPUT_GRADIENT)
        needs |= _OUTPUT_GRADIENT
    return _Rule("", needs, gives)


def _misplaced(role: _Role, action: Action, rank: int, ranks: tuple[int, ...]) -> str:
    """Reason why an action cannot be where it is; empty if it can."""
    is_message = action.kind in MESSAGES
    if is_message != (role is not _Role.ALONE):
        return "messages, and nothing else, stand in an P2PBatch"
    if (role, action.kind) not in _EFFECTS:
        return "receives are awaited, sends are released"
    if not 0 <= action.stage < len(ranks) or ranks[action.stage] != rank:
        return f"stage {action.stage} is not on rank {rank}"
    if is_message:
        peer = peer_stage(action)
        if not 0 <= peer < len(ranks):
            return f"there is no stage {peer}; the stages are 0 to {len(ranks) - 1}"
        if ranks[peer] == rank:
            return f"stage {peer} is on rank {rank} too; stages of one rank hand over without a message"
    return ""


def _untimely(rank: int, rule: _Rule, action: Action, missing: int, missing_there: int) -> str:
    """Reason why an action cannot be the next of a rank: it misses something, or gives what the rank has."""
    if missing:
        return f"no step of rank {rank} before it brings {_fact_text(missing, action.stage, action.microbatch)}"
    if missing_there:
        fact = _fact_text(missing_there, rule.neighbour, action.microbatch)
        return f"no step of rank {rank} before it brings {fact}"
    return f"an earlier step of rank {rank} has brought {_fact_text(rule.gives, action.stage, action.microbatch)}"


def _fact_text(facts: int, stage: int, microbatch: int) -> str:
    """Text of the first of the facts."""
    return next(f"{word} of stage {stage}, microbatch {microbatch}" for bit, word in _WORDS.items() if facts & bit)


def _require_pairs(plan: Plan, ranks: tuple[int, ...]) -> None:
    """Raises ScheduleError unless sends and receives are pairs, posted in one order at both ends of each lane."""
    sends: defaultdict[Lane, list[Action]] = defaultdict(list)
    receives: defaultdict[Lane, list[Action]] = defaultdict(list)
    lanes: dict[tuple[Kind, int], list[Action]] = {}
    for steps in plan:
        for step in steps:
            for message in step.posted if isinstance(step, P2PBatch) else ():
                lane = lanes.get((message.kind, message.stage))
                if lane is None:
                    ends = sends if message.kind in SENDS else receives
                    lane = lanes[message.kind, message.stage] = ends[lane_of(message, ranks)]
                lane.append(message)
    for name in sorted(sends.keys() | receives.keys()):
        sent, received = list(map(message_key, sends[name])), list(map(message_key, receives[name]))
        if sent != received:
            _raise_unpaired(plan, sends[name], receives[name], name[0])


def _raise_unpaired(plan: Plan, sends: list[Action], receives: list[Action], sender: int) -> None:
    """Raises ScheduleError for the first message of a lane that has no other end, or another one at its position."""
    for mine, theirs in ((sends, receives), (receives, sends)):
        keys = set(map(message_key, theirs))
        for message in mine:
            if message_key(message) not in keys:
                reason = f"its other end, {other_end(message)}, is not in the plan"
                raise plan_fault(plan, _position_of(plan, message), str(message), reason)
    for sent, received in zip(sends, receives, strict=True):
        if message_key(sent) != message_key(received):
            reason = f"rank {sender} sends {sent} before {other_end(received)}, and messages of one lane match in order"
            raise plan_fault(plan, _position_of(plan, received), str(received), reason)


def _position_of(plan: Plan, message: Action) -> PlanPosition:
    """The position at which a message is posted."""
    return next(
        (rank, index)
        for rank, steps in enumerate(plan)
        for index, step in enumerate(steps)
        if isinstance(step, P2PBatch) and message in step.posted
    )


def _require_releases(plan: Plan, ranks: tuple[int, ...]) -> None:
    """Raises ScheduleError where a send is released that may still be on its way.

    It has left if the rank has awaited something that the receiver posted after it had awaited the send.
    """
    posted_at: dict[MessageKey, int] = {}
    awaited_at: dict[MessageKey, int] = {}
    for steps in plan:
        for index, step in enumerate(steps):
            if not isinstance(step, P2PBatch):
                continue
            for message in step.posted:
                if message.kind in SENDS:
                    posted_at[message_key(message)] = index
            for message in step.awaited:
                awaited_at[message_key(message)] = index
    for rank, steps in enumerate(plan):
        heard: defaultdict[int, int] = defaultdict(int)
        # By peer: the step that it has reached for certain.
        for index, step in enumerate(steps):
            if not isinstance(step, P2PBatch):
                continue
            for message in step.awaited:
                peer = ranks[peer_stage(message)]
                heard[peer] = max(heard[peer], posted_at[message_key(message)])
            for message in step.released:
                landed_at = awaited_at.get(message_key(message))
                if landed_at is None or landed_at >= heard[ranks[peer_stage(message)]]:
                    reason = "it is held to have left, and may not have"
                    raise plan_fault(plan, (rank, index), str(message), reason)
