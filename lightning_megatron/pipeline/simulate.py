"""Plays and checks a pipeline plan on paper: what would run when, how much stands idle, and what would hang.

After `schedule` and `lower`, before the runtime: no stage, tensor or process is needed.

Note: the rules of the game are strict. A rank works through its steps in order. Posting a message never holds it; a
message lands when both ends have posted it and all earlier ones of its lane have landed, and a rank waits where its
plan awaits one. A plan that ends under these rules ends on every backend that keeps a lane's messages in order, with
or without buffered sends.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import pairwise
from operator import sub

from lightning_megatron.pipeline.consistency import require_consistent
from lightning_megatron.pipeline.grid import aligned, plan_grid
from lightning_megatron.pipeline.lower import (
    SENDS,
    Exchange,
    Lane,
    MessageKey,
    Plan,
    Step,
    cell_key,
    lane_of,
    message_key,
    other_end,
    rank_of_stage,
)
from lightning_megatron.pipeline.schedule import COMPUTES, MESSAGES, Action, Kind, ScheduleError

__all__ = ["Costs", "ScheduleError", "Span", "Timeline", "check", "draw", "play"]

# The computes after which an activation is not needed any more.
_LAST_USE = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
_BACKWARDS = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})

_ComputeKey = int
"""The number of a stage and a microbatch, twice, and 1 more for a forward."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How long each action takes, all in one unit of the caller's choice; actions not named here take no time."""

    forward: float = 1.0
    """The forward of one microbatch through one stage."""
    backward: float = 2.0
    """Its whole backward."""
    backward_input: float = 1.0
    """The half of a backward that makes the gradient of the stage's input."""
    backward_weight: float = 1.0
    """The half of a backward that makes the gradients of the stage's weights."""
    message: float = 0.0
    """From the moment that both ends have posted a message until it has landed."""

    def __post_init__(self) -> None:
        faults = [
            f"the cost {cost.name} ({value}) must be a finite number of at least 0"
            for cost in fields(self)
            if not (math.isfinite(value := getattr(self, cost.name)) and value >= 0)
        ]
        if not faults and self.forward == 0:
            faults.append(f"the cost forward ({self.forward}) must be above 0")
        if faults:
            raise ValueError("; ".join(faults))


@dataclass(frozen=True, slots=True)
class Span:
    """When a compute runs, in the unit of the costs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What `play` found, one entry per rank."""

    spans: tuple[tuple[Span, ...], ...]
    """The computes of each rank, in order."""
    makespan: float
    """From the start of the first step to the end of the last, in the unit of the costs."""
    bubbles: tuple[float, ...]
    """The share of the makespan in which a rank computes nothing, 0 to 1."""
    bubble: float
    """Their mean."""
    peak_activations: tuple[int, ...]
    """The most (stage, microbatch) pairs whose activations a rank keeps at one time."""


def check(plan: Plan) -> None:
    """Returns only if the plan runs to its end, each compute once and on inputs that have arrived.

    Raises ScheduleError with the rank, the step, the action and a grid of all ranks with the place marked, when a stage
    lacks a forward, or a backward in a plan that has backwards; when an action stands twice, before what it needs, or
    on another rank than its stage; when a send lacks its receive or the reverse; when the two ends of a lane post its
    messages in different orders; when a send is held to have left before it is certain; when ranks wait for each other
    for ever (by the rules of the note above).
    """
    require_consistent(plan)
    walk = _Walk(plan, Costs())
    walk.run()
    walk.require_end()


def play(plan: Plan, costs: Costs | None = None) -> Timeline:
    """The timeline of a plan, or of an order of computes alone, with these costs (`Costs()` if none are given).

    In a plan a rank waits where it awaits a message. In an order a result simply reaches the next stage one message
    cost after it was made. The plan must be one that `check` lets pass.
    Raises ScheduleError if it does not run to its end.
    """
    walk = _Walk(plan, Costs() if costs is None else costs)
    walk.run()
    walk.require_end()
    makespan = max(walk.clocks, default=0.0)
    busy = [sum(map(sub, ends, starts)) for starts, ends in zip(walk.starts, walk.ends, strict=True)]
    bubbles = tuple(1 - rank_busy / makespan for rank_busy in busy)
    return Timeline(
        spans=tuple(
            tuple(map(Span, _computes(steps), starts, ends))
            for steps, starts, ends in zip(plan, walk.starts, walk.ends, strict=True)
        ),
        makespan=makespan,
        bubbles=bubbles,
        bubble=sum(bubbles) / len(bubbles),
        peak_activations=tuple(map(_peak_activations, plan)),
    )


def draw(timeline: Timeline) -> str:
    """A grid with a line per rank and a column from each moment at which something starts or ends to the next.

    `=` goes on with the action to its left, `.` is idle. Each line ends in the rank's bubble and peak of activations.
    """
    moments = sorted({_rounded(time) for spans in timeline.spans for span in spans for time in (span.start, span.end)})
    column_of = {moment: column for column, moment in enumerate(moments)}
    rows = [["time", *(f"{moment:g}" for moment in moments[:-1]), "bubble", "peak"]]
    for rank, spans in enumerate(timeline.spans):
        cells = ["."] * (len(moments) - 1)
        for span in spans:
            first, end = column_of[_rounded(span.start)], column_of[_rounded(span.end)]
            cells[first:end] = [str(span.action), *["="] * (end - first - 1)]
        rows.append([f"rank {rank}", *cells, f"{timeline.bubbles[rank]:.1%}", str(timeline.peak_activations[rank])])
    return f"{aligned(rows)}\nmakespan {timeline.makespan:g}, bubble {timeline.bubble:.1%}"


def _computes(steps: tuple[Step, ...]) -> Iterator[Action]:
    return (step for step in steps if isinstance(step, Action) and step.kind in COMPUTES)


def _peak_activations(steps: tuple[Step, ...]) -> int:
    """The most activations alive at one time; without a backward an activation lives as long as its forward."""
    kept_until_backward = {cell_key(c.stage, c.microbatch) for c in _computes(steps) if c.kind in _LAST_USE}
    alive, peak = 0, 0
    for step in _computes(steps):
        if step.kind is Kind.FORWARD:
            peak = max(peak, alive + 1)
            alive += cell_key(step.stage, step.microbatch) in kept_until_backward
        elif step.kind in _LAST_USE:
            alive -= 1
    return peak


def _rounded(time: float) -> float:
    """The time without the last digits, in which sums of the same costs in another order differ."""
    return float(f"{time:.9g}")


@dataclass(slots=True)
class _Lane:
    """What its two ends have posted and has not landed, in order, and when; and when the last one landed."""

    sent: deque[tuple[MessageKey, float]] = field(default_factory=deque)
    received: deque[tuple[MessageKey, float]] = field(default_factory=deque)
    clock: float = 0.0


class _Walk:
    """One run through a plan: which rank is where, and when.

    Event-driven: `ready` holds the ranks that can take a step. A rank that cannot leaves it, and what it waits for puts
    it back, so the work is proportional to the number of actions, not to that times the ranks.
    """

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan = plan
        self.ranks = rank_of_stage(plan)
        self.message_cost = costs.message
        self.cost_of = {
            Kind.FORWARD: costs.forward,
            Kind.BACKWARD: costs.backward,
            Kind.BACKWARD_INPUT: costs.backward_input,
            Kind.BACKWARD_WEIGHT: costs.backward_weight,
        }
        self.positions = [0] * len(plan)
        self.clocks = [0.0] * len(plan)
        # Of the computes of each rank, in order.
        self.starts: list[list[float]] = [[] for _ in plan]
        self.ends: list[list[float]] = [[] for _ in plan]
        self.ready = list(range(len(plan)))
        self.lanes: defaultdict[Lane, _Lane] = defaultdict(_Lane)
        # The same by the kind and stage of a message, which are quick to look up.
        self.lanes_of: dict[tuple[Kind, int], _Lane] = {}
        # When a message landed, and which rank it holds up.
        self.landed: dict[MessageKey, float] = {}
        self.awaiting: dict[MessageKey, int] = {}
        # By rank: up to which step it has posted its messages.
        self.posted = [0] * len(plan)
        # When a compute ended, and which rank waits for it. Each has at most one reader.
        self.ended: dict[_ComputeKey, float] = {}
        self.waiting: dict[_ComputeKey, int] = {}

    def run(self) -> None:
        """Goes on until no rank can take a step: all at their end, or stuck."""
        while self.ready:
            rank = self.ready.pop()
            steps = self.plan[rank]
            while self.positions[rank] < len(steps):
                step = steps[self.positions[rank]]
                goes_on = self._exchange(rank, step) if isinstance(step, Exchange) else self._compute(rank, step)
                if not goes_on:
                    break
                self.positions[rank] += 1

    def require_end(self) -> None:
        """Raises ScheduleError naming a circle of ranks that wait for each other, if any rank is stuck."""
        stuck = {rank: at for rank, at in enumerate(self.positions) if at < len(self.plan[rank])}
        if not stuck:
            return
        chain = [min(stuck)]
        while chain[-1] in stuck and chain[-1] not in chain[:-1]:
            chain.append(self.ranks[self._awaited(chain[-1]).stage])
        if chain[-1] in stuck:
            # What only leads into the circle is not part of it.
            chain = chain[chain.index(chain[-1]) :]
        waits = "\n".join(
            f"rank {rank}, step {stuck[rank]}, {self._blocked(rank)}: waits for {self._awaited(rank)} of rank {peer}"
            for rank, peer in pairwise(chain)
        )
        grid = plan_grid(self.plan, stuck)
        raise ScheduleError(f"the plan never ends, its ranks wait for each other:\n{waits}\n{grid}")

    def _exchange(self, rank: int, exchange: Exchange) -> bool:
        """Posts the messages, once, and waits for those awaited. Whether the rank can go on."""
        if self.posted[rank] <= self.positions[rank]:
            self.posted[rank] = self.positions[rank] + 1
            for message in exchange.posted:
                lane = self._lane_of(message)
                queue = lane.sent if message.kind in SENDS else lane.received
                queue.append((message_key(message), self.clocks[rank]))
                self._land(lane)
        for message in exchange.awaited:
            key = message_key(message)
            landed_at = self.landed.get(key)
            if landed_at is None:
                self.awaiting[key] = rank
                return False
            self.clocks[rank] = max(self.clocks[rank], landed_at)
        return True

    def _lane_of(self, message: Action) -> _Lane:
        lane = self.lanes_of.get((message.kind, message.stage))
        if lane is None:
            lane = self.lanes_of[message.kind, message.stage] = self.lanes[lane_of(message, self.ranks)]
        return lane

    def _land(self, lane: _Lane) -> None:
        """Lands the messages of a lane that both ends have posted, in order."""
        while lane.sent and lane.received:
            key, sent_at = lane.sent.popleft()
            _, received_at = lane.received.popleft()
            lane.clock = self.landed[key] = max(sent_at, received_at, lane.clock) + self.message_cost
            if key in self.awaiting:
                self.ready.append(self.awaiting.pop(key))

    def _compute(self, rank: int, action: Action) -> bool:
        """Runs the action if the neighbouring stage has made its input. Whether the rank can go on."""
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if kind not in self.cost_of:
            return kind not in MESSAGES
        start = self.clocks[rank]
        source = stage - 1 if kind is Kind.FORWARD else stage + 1
        if 0 <= source < len(self.ranks) and kind is not Kind.BACKWARD_WEIGHT:
            key = 2 * cell_key(source, microbatch) + (kind is Kind.FORWARD)
            made_at = self.ended.get(key)
            if made_at is None:
                self.waiting[key] = rank
                return False
            start = max(start, made_at + (self.message_cost if self.ranks[source] != rank else 0.0))
        end = start + self.cost_of[kind]
        self.clocks[rank] = end
        self.starts[rank].append(start)
        self.ends[rank].append(end)
        if kind is not Kind.BACKWARD_WEIGHT:
            made = 2 * cell_key(stage, microbatch) + (kind is Kind.FORWARD)
            self.ended[made] = end
            if made in self.waiting:
                self.ready.append(self.waiting.pop(made))
        return True

    def _blocked(self, rank: int) -> Action:
        """The action of a stuck rank that cannot go on: a compute, or a receive that does not land."""
        step = self.plan[rank][self.positions[rank]]
        if isinstance(step, Action):
            return step
        return next(message for message in step.awaited if message_key(message) not in self.landed)

    def _awaited(self, rank: int) -> Action:
        """What a stuck rank waits for: the other end of the message that its lane is at, or the compute it reads."""
        blocked = self._blocked(rank)
        if blocked.kind in MESSAGES:
            key, _ = self._lane_of(blocked).received[0]
            posted = (m for step in self.plan[rank] if isinstance(step, Exchange) for m in step.posted)
            return other_end(next(m for m in posted if m.kind not in SENDS and message_key(m) == key))
        step_back = -1 if blocked.kind is Kind.FORWARD else 1
        return Action(blocked.kind, blocked.stage + step_back, blocked.microbatch)
