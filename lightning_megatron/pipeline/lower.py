"""Passes that turn an order of computes into the full plan that a rank executes.

Between `schedule`, which knows only computes, and the runtime, which does nothing that its plan does not name.

    add_messages      sends after the computes that make them, receives before the computes that need them
    add_reductions    `RG` after the last backward of each stage
    add_gathers       `GP` before the first forward of each stage

Note: posting never waits. A message is posted at both of its ends and lands later; a rank waits only for a receive
that its next compute needs. Messages of one lane (from one rank to another, forward or backward) are posted in one
order at both ends, that in which the sender makes them, and lanes do not wait for each other. Two neighbours that each
have something for the other, and at pp 2 the next rank that is also the previous one, therefore cannot block.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise, zip_longest

from lightning_megatron.pipeline.paused_gc import paused_gc
from lightning_megatron.pipeline.schedule import WHOLE_STAGE, Action, Kind, Order, ScheduleError


@dataclass(frozen=True, slots=True)
class P2PBatch:
    """The messages of one rank between two computes.

    A message names the stage at its own end: `1SF0` is sent by stage 1 and arrives as `2RF0` at stage 2; `1SB0` is the
    gradient of stage 1's input and arrives as `0RB0` at stage 0.
    """

    posted: tuple[Action, ...]
    """Sends and receives that start here."""
    awaited: tuple[Action, ...] = ()
    """Receives, posted here or earlier, that must have landed before the rank goes on."""
    released: tuple[Action, ...] = ()
    """Sends that have left for certain, since what was awaited here was made after they arrived."""

    def __str__(self) -> str:
        """The messages, with `!` where they are awaited and `-` where they are released."""
        marks = (("", self.posted), ("!", self.awaited), ("-", self.released))
        return "[" + " ".join(f"{message}{mark}" for mark, messages in marks for message in messages) + "]"


Step = Action | P2PBatch
Plan = tuple[tuple[Step, ...], ...]
"""The steps of every pp rank. An `Order` is the special case without messages."""

MessageKey = int
"""A number that both ends of a message have in common, and no other message of a plan has."""

Lane = tuple[int, int, bool]
"""The sending rank, the receiving rank, whether it goes forward."""

_OTHER_END = {
    Kind.SEND_FORWARD: Kind.RECV_FORWARD,
    Kind.RECV_FORWARD: Kind.SEND_FORWARD,
    Kind.SEND_BACKWARD: Kind.RECV_BACKWARD,
    Kind.RECV_BACKWARD: Kind.SEND_BACKWARD,
}
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})

# From the stage that a message names to the one at the other end.
_TO_PEER = {Kind.SEND_FORWARD: 1, Kind.RECV_FORWARD: -1, Kind.SEND_BACKWARD: -1, Kind.RECV_BACKWARD: 1}

# Whether a message goes forward, and from the stage that it names to the one that receives it.
_TO_RECEIVER = {
    Kind.SEND_FORWARD: (True, 1),
    Kind.RECV_FORWARD: (True, 0),
    Kind.SEND_BACKWARD: (False, -1),
    Kind.RECV_BACKWARD: (False, 0),
}
# What a key adds to its message's own stage and microbatch: the way to the receiver, and whether it goes forward.
_KEY_OF_KIND = {kind: (to_receiver << 33) + is_forward for kind, (is_forward, to_receiver) in _TO_RECEIVER.items()}

_INPUT_GRADIENTS = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})
_WEIGHT_GRADIENTS = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})


@dataclass(frozen=True)
class ScheduledProgram:
    """A plan, and the pp rank that holds each stage."""

    plan: Plan
    ranks: tuple[int, ...]
    overlapped: frozenset[Action] = frozenset()
    """Forwards that overlap with the backward right after them."""


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


def cell_key(stage: int, microbatch: int) -> int:
    """A number for a stage and a microbatch.

    Note: a number and no tuple, since a plan may have a million of them, and the garbage collector looks at each tuple.
    """
    return (stage << 32) + microbatch


def message_key(message: Action) -> MessageKey:
    """The key of a message: the stage that receives it, its microbatch, whether it goes forward."""
    return (message.stage << 33) + 2 * message.microbatch + _KEY_OF_KIND[message.kind]


def lane_of(message: Action, ranks: tuple[int, ...]) -> Lane:
    """The lane that a message goes by."""
    own, peer = ranks[message.stage], ranks[peer_stage(message)]
    is_forward = _TO_RECEIVER[message.kind][0]
    return (own, peer, is_forward) if message.kind in SENDS else (peer, own, is_forward)


def hops(ranks: tuple[int, ...]) -> list[tuple[int, int]]:
    """The pairs of ranks, sender first, between which forward messages go, in the order of the stages."""
    pairs = ((a, b) for a, b in pairwise(ranks) if a != b)
    return list(dict.fromkeys(pairs))


@paused_gc()
def lower(order: Order, overlapped: frozenset[Action] = frozenset()) -> ScheduledProgram:
    """An order with everything that a training step needs between its computes; `overlapped` as for `add_messages`."""
    return ScheduledProgram(
        add_gathers(add_reductions(add_messages(order, overlapped))), rank_of_stage(order), overlapped
    )


def add_messages(order: Order, overlapped: frozenset[Action] = frozenset(), *, ahead: int = 1) -> Plan:
    """The plan of an order: sends and receives between its computes.

    A send is posted right after the compute that makes it. A receive is awaited right before the compute that needs it
    and posted `ahead` computes earlier, so that it overlaps with them; earlier still where its lane's order demands it,
    but a gradient not before its forward. Two neighbouring stages on one rank hand over without a message.
    Forwards in `overlapped` overlap with the compute after them: such two count as one, nothing in between.
    """
    ranks = rank_of_stage(order)
    groups = [_grouped(actions, overlapped) for actions in order]
    gaps = [_Gaps(len(of_rank)) for of_rank in groups]
    events = _GapsOfEvents()
    lanes: defaultdict[Lane, list[MessageKey]] = defaultdict(list)
    for gap, of_rank in zip(gaps, groups, strict=True):
        _add_sends_and_waits(gap, of_rank, ranks, events, lanes)
    for (_, receiver, _), sent in lanes.items():
        _post_receives(gaps[receiver], sent, events, ahead)
    for gap in gaps:
        _release_sends(gap, events, ranks)
    return tuple(_joined(of_rank, gap) for of_rank, gap in zip(groups, gaps, strict=True))


def add_reductions(plan: Plan) -> Plan:
    """The plan with `REDUCE_GRADS` of each stage right after the last step that adds to its weights' gradients."""
    return tuple(_with_actions(steps, Kind.REDUCE_GRADS, _WEIGHT_GRADIENTS, is_last=True) for steps in plan)


def add_gathers(plan: Plan) -> Plan:
    """The plan with `GATHER_PARAMS` of each stage right before its first forward."""
    return tuple(_with_actions(steps, Kind.GATHER_PARAMS, frozenset({Kind.FORWARD}), is_last=False) for steps in plan)


class _Gaps:
    """Messages that come before each group of a rank, and after the last."""

    def __init__(self, num_groups: int) -> None:
        # Sends of what the group before makes.
        self.sent: list[tuple[Action, ...]] = [()] * (num_groups + 1)
        self.received = self.sent[:]
        # Receives that the group after needs.
        self.awaited = self.sent[:]
        self.released = self.sent[:]


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Messages that computes of one kind on one stage send and receive; keys are those of microbatch 0."""

    send: Kind | None
    send_key: MessageKey
    lane: list[MessageKey]
    receive: Kind | None
    receive_key: MessageKey


@dataclass
class _GapsOfEvents:
    """Gap of its rank in which something happens, by message or forward."""

    made: dict[MessageKey, int] = field(default_factory=dict)
    """The posting of a send."""
    needed: dict[MessageKey, int] = field(default_factory=dict)
    """The wait for a receive."""
    receives: dict[MessageKey, Action] = field(default_factory=dict)
    """The receive itself."""
    forwards: dict[int, int] = field(default_factory=dict)
    """The forward after the gap, by stage and microbatch."""


def _grouped(actions: tuple[Action, ...], overlapped: frozenset[Action]) -> list[tuple[Action, ...]]:
    groups: list[tuple[Action, ...]] = []
    for action in actions:
        if groups and len(groups[-1]) == 1 and groups[-1][0] in overlapped:
            groups[-1] += (action,)
        else:
            groups.append((action,))
    return groups


def _send_of(action: Action, ranks: tuple[int, ...]) -> Action | None:
    stage = action.stage
    if action.kind is Kind.FORWARD and stage + 1 < len(ranks) and ranks[stage + 1] != ranks[stage]:
        return Action(Kind.SEND_FORWARD, stage, action.microbatch)
    if action.kind in _INPUT_GRADIENTS and stage > 0 and ranks[stage - 1] != ranks[stage]:
        return Action(Kind.SEND_BACKWARD, stage, action.microbatch)
    return None


def _receive_of(action: Action, ranks: tuple[int, ...]) -> Action | None:
    stage = action.stage
    if action.kind is Kind.FORWARD and stage > 0 and ranks[stage - 1] != ranks[stage]:
        return Action(Kind.RECV_FORWARD, stage, action.microbatch)
    if action.kind in _INPUT_GRADIENTS and stage + 1 < len(ranks) and ranks[stage + 1] != ranks[stage]:
        return Action(Kind.RECV_BACKWARD, stage, action.microbatch)
    return None


def _add_sends_and_waits(
    gaps: _Gaps,
    groups: list[tuple[Action, ...]],
    ranks: tuple[int, ...],
    events: _GapsOfEvents,
    lanes: defaultdict[Lane, list[MessageKey]],
) -> None:
    """Puts the sends of a rank after their computes and the waits before theirs."""
    traffic: dict[tuple[Kind, int], _Traffic] = {}
    for index, action in ((index, action) for index, group in enumerate(groups) for action in group):
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        ends = traffic.get((kind, stage))
        if ends is None:
            ends = traffic[kind, stage] = _traffic_of(Action(kind, stage, 0), ranks, lanes)
        if kind is Kind.FORWARD:
            events.forwards[cell_key(stage, microbatch)] = index
        if ends.send is not None:
            key = ends.send_key + 2 * microbatch
            gaps.sent[index + 1] += (Action(ends.send, stage, microbatch),)
            events.made[key] = index + 1
            ends.lane.append(key)
        if ends.receive is not None:
            key = ends.receive_key + 2 * microbatch
            receive = events.receives[key] = Action(ends.receive, stage, microbatch)
            gaps.awaited[index] += (receive,)
            events.needed[key] = index


def _traffic_of(action: Action, ranks: tuple[int, ...], lanes: defaultdict[Lane, list[MessageKey]]) -> _Traffic:
    send, receive = _send_of(action, ranks), _receive_of(action, ranks)
    return _Traffic(
        send=send.kind if send else None,
        send_key=message_key(send) if send else 0,
        lane=lanes[lane_of(send, ranks)] if send else [],
        receive=receive.kind if receive else None,
        receive_key=message_key(receive) if receive else 0,
    )


def _post_receives(gaps: _Gaps, sent: list[MessageKey], events: _GapsOfEvents, ahead: int) -> None:
    """Posts the receives of one lane in the order of its sends: before their computes, none later than it may be."""
    # Sends that no compute reads have no receive; `check` reports them.
    keys = [key for key in sent if key in events.receives]
    latest = len(gaps.received)
    wanted: list[int] = []
    for key in reversed(keys):
        latest = min(latest, max(0, events.needed[key] - ahead))
        wanted.append(latest)
    earliest = 0
    for key, gap in zip(keys, reversed(wanted), strict=True):
        receive = events.receives[key]
        earliest = max(earliest, gap)
        if receive.kind is Kind.RECV_BACKWARD:
            # The shape of a gradient is known once its forward has run.
            earliest = max(earliest, events.forwards.get(cell_key(receive.stage, receive.microbatch), -1) + 1)
        gaps.received[earliest] += (receive,)


def _release_sends(gaps: _Gaps, events: _GapsOfEvents, ranks: tuple[int, ...]) -> None:
    """Marks where a rank knows that a send has left: it has awaited something that the receiver posted afterwards."""
    in_flight: defaultdict[int, list[tuple[int, int, int, Action]]] = defaultdict(list)
    # By receiver: the gap in which it waits for the message, that of the send, its turn there, and the message; the
    # first gap first.
    for at, (sends, receives) in enumerate(zip(gaps.sent, gaps.awaited, strict=True)):
        for turn, send in enumerate(sends):
            needed_at = events.needed.get(message_key(send))
            if needed_at is not None:
                heappush(in_flight[ranks[peer_stage(send)]], (needed_at, at, turn, send))
        for receive in receives:
            on_the_way = in_flight[ranks[peer_stage(receive)]]
            made_at = events.made.get(message_key(receive), -1)
            while on_the_way and on_the_way[0][0] < made_at:
                gaps.released[at] += (heappop(on_the_way)[3],)


def _joined(groups: list[tuple[Action, ...]], gaps: _Gaps) -> tuple[Step, ...]:
    steps: list[Step] = []
    for sent, received, awaited, released, group in zip_longest(
        gaps.sent, gaps.received, gaps.awaited, gaps.released, groups, fillvalue=()
    ):
        if sent or received or awaited:
            steps.append(P2PBatch(sent + received, awaited, released))
        steps += group
    return tuple(steps)


def _with_actions(steps: tuple[Step, ...], kind: Kind, near: frozenset[Kind], *, is_last: bool) -> tuple[Step, ...]:
    """The steps with one action of `kind` for each stage, after its last (or before its first) action in `near`."""
    indices: dict[int, int] = {}
    for index, step in enumerate(steps):
        if isinstance(step, Action) and step.kind in near and (is_last or step.stage not in indices):
            indices[step.stage] = index
    result = list(steps)
    for stage, index in sorted(indices.items(), key=lambda item: -item[1]):
        result.insert(index + is_last, Action(kind, stage, WHOLE_STAGE))
    return tuple(result)
