"""What can be told of a plan without playing it: is it complete, in an order that each rank can follow, well matched.

The first half of `simulate.check`; the second half, whether ranks wait for each other for ever, needs the play.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product

from lightning_megatron.pipeline.grid import Place, plan_fault
from lightning_megatron.pipeline.lower import (
    Exchange,
    MessageKey,
    Plan,
    message_key,
    other_end,
    peer_stage,
    rank_of_stage,
)
from lightning_megatron.pipeline.schedule import COMPUTES, MESSAGES, Action, Kind

_Fact = tuple[str, int, int]
"""What a rank has in hand: its name, stage, microbatch."""

_Posted = defaultdict[tuple[int, int], dict[MessageKey, tuple[Place, Action]]]

_OUTPUT, _INPUT, _SENT_OUTPUT = "the output", "the input", "the sent output"
_OUTPUT_GRADIENT, _INPUT_GRADIENT = "the gradient of the output", "the gradient of the input"
_WEIGHT_GRADIENT, _SENT_GRADIENT = "the gradients of the weights", "the sent gradient of the input"

_GIVES: dict[Kind, tuple[str, ...]] = {
    Kind.FORWARD: (_OUTPUT,),
    Kind.BACKWARD: (_INPUT_GRADIENT, _WEIGHT_GRADIENT),
    Kind.BACKWARD_INPUT: (_INPUT_GRADIENT,),
    Kind.BACKWARD_WEIGHT: (_WEIGHT_GRADIENT,),
    Kind.RECV_FORWARD: (_INPUT,),
    Kind.RECV_BACKWARD: (_OUTPUT_GRADIENT,),
    Kind.SEND_FORWARD: (_SENT_OUTPUT,),
    Kind.SEND_BACKWARD: (_SENT_GRADIENT,),
    Kind.REDUCE_GRADS: (),
    Kind.GATHER_PARAMS: (),
}

# Of the action's own stage; what comes from a neighbouring stage is in `_needs`.
_NEEDS: dict[Kind, tuple[str, ...]] = {
    Kind.FORWARD: (),
    Kind.BACKWARD: (_OUTPUT,),
    Kind.BACKWARD_INPUT: (_OUTPUT,),
    Kind.BACKWARD_WEIGHT: (_INPUT_GRADIENT,),
    Kind.SEND_FORWARD: (_OUTPUT,),
    Kind.SEND_BACKWARD: (_INPUT_GRADIENT,),
    Kind.RECV_FORWARD: (),
    Kind.RECV_BACKWARD: (),
    Kind.REDUCE_GRADS: (),
    Kind.GATHER_PARAMS: (),
}

_BACKWARDS = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})
_SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})


def require_consistent(plan: Plan) -> None:
    """Returns only if each rank's steps are complete, once each and after what they need, and all messages are pairs.

    Raises ScheduleError with the place otherwise.
    """
    ranks = rank_of_stage(plan)
    _require_ranks(plan, ranks)
    _require_pairs(plan, ranks)


def _require_ranks(plan: Plan, ranks: tuple[int, ...]) -> None:
    """Raises ScheduleError unless the steps of each rank are complete, each once and after what it needs."""
    computes = [step for steps in plan for step in steps if isinstance(step, Action) and step.kind in COMPUTES]
    num_microbatches = 1 + max((compute.microbatch for compute in computes), default=-1)
    has_backward = any(compute.kind is not Kind.FORWARD for compute in computes)
    wanted = (_OUTPUT, _INPUT_GRADIENT, _WEIGHT_GRADIENT) if has_backward else (_OUTPUT,)
    for rank, steps in enumerate(plan):
        done: set[_Fact] = set()
        for index, step in enumerate(steps):
            in_exchange = isinstance(step, Exchange)
            for action in step.messages if isinstance(step, Exchange) else (step,):
                reason = _misplaced(action, in_exchange, rank, ranks) or _untimely(action, rank, ranks, done)
                if reason:
                    raise plan_fault(plan, (rank, index), str(action), reason)
                for name in _GIVES[action.kind]:
                    done.add((name, action.stage, action.microbatch))
        stages = [stage for stage, owner in enumerate(ranks) if owner == rank]
        for fact in product(wanted, stages, range(num_microbatches)):
            if fact not in done:
                raise plan_fault(plan, (rank, len(steps)), "the end", f"no step of rank {rank} makes {_in_words(fact)}")


def _misplaced(action: Action, in_exchange: bool, rank: int, ranks: tuple[int, ...]) -> str:
    """Why an action cannot stand where it does; empty if it can."""
    is_message = action.kind in MESSAGES
    if is_message != in_exchange:
        return "messages, and nothing else, stand in an Exchange"
    if not 0 <= action.stage < len(ranks) or ranks[action.stage] != rank:
        return f"stage {action.stage} is not on rank {rank}"
    if is_message:
        peer = peer_stage(action)
        if not 0 <= peer < len(ranks):
            return f"there is no stage {peer}; the stages are 0 to {len(ranks) - 1}"
        if ranks[peer] == rank:
            return f"stage {peer} is on rank {rank} too; stages of one rank hand over without a message"
    return ""


def _untimely(action: Action, rank: int, ranks: tuple[int, ...], done: set[_Fact]) -> str:
    """Why an action cannot be the next of a rank that has this done; empty if it can."""
    for fact in _needs(action, rank, ranks):
        if fact not in done:
            return f"no step of rank {rank} before it brings {_in_words(fact)}"
    for name in _GIVES[action.kind]:
        fact = (name, action.stage, action.microbatch)
        if fact in done:
            return f"an earlier step of rank {rank} has brought {_in_words(fact)}"
    return ""


def _needs(action: Action, rank: int, ranks: tuple[int, ...]) -> list[_Fact]:
    """What a rank must have in hand for an action."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    facts = [(name, stage, microbatch) for name in _NEEDS[kind]]
    if kind is Kind.FORWARD and stage > 0:
        is_local = ranks[stage - 1] == rank
        facts.append((_OUTPUT, stage - 1, microbatch) if is_local else (_INPUT, stage, microbatch))
    elif kind in _BACKWARDS and stage < len(ranks) - 1:
        is_local = ranks[stage + 1] == rank
        facts.append((_INPUT_GRADIENT, stage + 1, microbatch) if is_local else (_OUTPUT_GRADIENT, stage, microbatch))
    return facts


def _in_words(fact: _Fact) -> str:
    return f"{fact[0]} of stage {fact[1]}, microbatch {fact[2]}"


def _require_pairs(plan: Plan, ranks: tuple[int, ...]) -> None:
    """Raises ScheduleError unless sends and receives are pairs, in one order from each rank to each other."""
    # By (sending rank, receiving rank), in the order in which they are posted.
    sends: _Posted = defaultdict(dict)
    receives: _Posted = defaultdict(dict)
    for rank, steps in enumerate(plan):
        for index, step in enumerate(steps):
            for message in step.messages if isinstance(step, Exchange) else ():
                peer = ranks[peer_stage(message)]
                posted = sends[rank, peer] if message.kind in _SENDS else receives[peer, rank]
                posted[message_key(message)] = ((rank, index), message)
    for channel in sorted(sends.keys() | receives.keys()):
        for mine, theirs in ((sends[channel], receives[channel]), (receives[channel], sends[channel])):
            for key in mine:
                if key not in theirs:
                    place, message = mine[key]
                    reason = f"its other end, {other_end(message)}, is not in the plan"
                    raise plan_fault(plan, place, str(message), reason)
        for sent_key, received_key in zip(sends[channel], receives[channel], strict=True):
            if sent_key != received_key:
                place, message = receives[channel][received_key]
                reason = (
                    f"rank {channel[0]} sends {sends[channel][sent_key][1]} before {other_end(message)}, "
                    f"and messages from one rank to another match in order"
                )
                raise plan_fault(plan, place, str(message), reason)
