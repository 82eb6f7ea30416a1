"""Plays and checks a pipeline plan on paper: what would run when, how much stands idle, and what would hang.

After `schedule` and `lower`, before the runtime: no stage, tensor or process is needed.

Note: the rules of the game are the strictest that a runtime may have. A rank works through its steps in order. It posts
all messages of an Exchange at once and goes on when all of them are complete; a message is complete when both ends have
posted it. Messages from one rank to another match in the order in which they are posted. A plan that ends under these
rules ends on every backend, with or without buffered sends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import pairwise

from lightning_megatron.pipeline.consistency import require_consistent
from lightning_megatron.pipeline.grid import aligned, plan_grid
from lightning_megatron.pipeline.lower import Exchange, MessageKey, Plan, Step, message_key, other_end, rank_of_stage
from lightning_megatron.pipeline.schedule import MESSAGES, Action, Kind, ScheduleError

__all__ = ["Costs", "ScheduleError", "Span", "Timeline", "check", "draw", "play"]

# The computes after which an activation is not needed any more.
_LAST_USE = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
_BACKWARDS = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})

_ComputeKey = tuple[bool, int, int]
"""Whether it is a forward, its stage, its microbatch."""


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
    """From the moment that both ends have posted a message until it is complete."""

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
    on another rank than its stage; when a send lacks its receive or the reverse; when messages from one rank to another
    are posted in different orders; when ranks wait for each other for ever (by the rules of the note above).
    """
    require_consistent(plan)
    walk = _Walk(plan, Costs())
    walk.run()
    walk.require_end()


def play(plan: Plan, costs: Costs | None = None) -> Timeline:
    """The timeline of a plan, or of an order of computes alone, with these costs (`Costs()` if none are given).

    In a plan a rank is held by its messages until they are complete. In an order a result simply reaches the next stage
    one message cost after it was made, and no rank waits for its sends. The plan must be one that `check` lets pass.
    Raises ScheduleError if it does not run to its end.
    """
    walk = _Walk(plan, Costs() if costs is None else costs)
    walk.run()
    walk.require_end()
    makespan = max(walk.clocks, default=0.0)
    busy = [sum(span.end - span.start for span in spans) for spans in walk.spans]
    bubbles = tuple(1 - rank_busy / makespan for rank_busy in busy)
    return Timeline(
        spans=tuple(map(tuple, walk.spans)),
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


def _peak_activations(steps: tuple[Step, ...]) -> int:
    """The most activations alive at one time; without a backward an activation lives as long as its forward."""
    kept_until_backward = {(s.stage, s.microbatch) for s in steps if isinstance(s, Action) and s.kind in _LAST_USE}
    alive, peak = 0, 0
    for step in steps:
        if not isinstance(step, Action):
            continue
        if step.kind is Kind.FORWARD:
            peak = max(peak, alive + 1)
            alive += (step.stage, step.microbatch) in kept_until_backward
        elif step.kind in _LAST_USE:
            alive -= 1
    return peak


def _rounded(time: float) -> float:
    """The time without the last digits, in which sums of the same costs in another order differ."""
    return float(f"{time:.9g}")


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
        self.spans: list[list[Span]] = [[] for _ in plan]
        self.ready = list(range(len(plan)))
        # Messages of which one end is posted: that end's rank, and when.
        self.posted: dict[MessageKey, tuple[int, float]] = {}
        self.num_incomplete = [0] * len(plan)
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
        """Posts the messages and completes those already posted at the other end. Whether the rank can go on."""
        posted_at = self.clocks[rank]
        for message in exchange.messages:
            key = message_key(message)
            other = self.posted.pop(key, None)
            if other is None:
                self.posted[key] = (rank, posted_at)
                self.num_incomplete[rank] += 1
                continue
            peer, peer_posted_at = other
            done_at = max(posted_at, peer_posted_at) + self.message_cost
            self.clocks[rank] = max(self.clocks[rank], done_at)
            self.clocks[peer] = max(self.clocks[peer], done_at)
            self.num_incomplete[peer] -= 1
            if self.num_incomplete[peer] == 0 and peer != rank:
                self.positions[peer] += 1
                self.ready.append(peer)
        return self.num_incomplete[rank] == 0

    def _compute(self, rank: int, action: Action) -> bool:
        """Runs the action if the neighbouring stage has made its input. Whether the rank can go on."""
        if action.kind not in self.cost_of:
            return action.kind not in MESSAGES
        source = self._source(action)
        start = self.clocks[rank]
        if source is not None:
            made_at = self.ended.get(source)
            if made_at is None:
                self.waiting[source] = rank
                return False
            start = max(start, made_at + (self.message_cost if self.ranks[source[1]] != rank else 0.0))
        end = start + self.cost_of[action.kind]
        self.clocks[rank] = end
        self.spans[rank].append(Span(action, start, end))
        if action.kind is not Kind.BACKWARD_WEIGHT:
            made = (action.kind is Kind.FORWARD, action.stage, action.microbatch)
            self.ended[made] = end
            if made in self.waiting:
                self.ready.append(self.waiting.pop(made))
        return True

    def _source(self, action: Action) -> _ComputeKey | None:
        """The compute of the neighbouring stage that makes the input of this one; None at either end of the model."""
        if action.kind is Kind.FORWARD and action.stage > 0:
            return True, action.stage - 1, action.microbatch
        if action.kind in _BACKWARDS and action.stage < len(self.ranks) - 1:
            return False, action.stage + 1, action.microbatch
        return None

    def _blocked(self, rank: int) -> Action:
        """The action of a stuck rank that cannot complete."""
        step = self.plan[rank][self.positions[rank]]
        if isinstance(step, Action):
            return step
        return next(message for message in step.messages if message_key(message) in self.posted)

    def _awaited(self, rank: int) -> Action:
        """What a stuck rank waits for: the other end of a message, or the compute that makes its input."""
        blocked = self._blocked(rank)
        if blocked.kind in MESSAGES:
            return other_end(blocked)
        step_back = -1 if blocked.kind is Kind.FORWARD else 1
        return Action(blocked.kind, blocked.stage + step_back, blocked.microbatch)
