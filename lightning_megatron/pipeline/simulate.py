"""Simulates and checks a pipeline plan: what would run when, how much is idle, and what would hang.

After `schedule` and `lower`, before the runtime: no stage, tensor or process is needed.

Note: the rules of the game are strict. A rank works through its steps in order. Posting a message never holds it; a
message lands when both ends have posted it and all earlier ones of its lane have landed, and a rank waits where its
plan awaits one. A plan that ends under these rules ends on every backend that keeps a lane's messages in order, with
or without buffered sends.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from operator import sub

from lightning_megatron.pipeline.consistency import require_consistent
from lightning_megatron.pipeline.grid import plan_grid
from lightning_megatron.pipeline.lower import (
    SENDS,
    Lane,
    MessageKey,
    P2PBatch,
    Plan,
    cell_key,
    lane_of,
    message_key,
    other_end,
    rank_of_stage,
)
from lightning_megatron.pipeline.paused_gc import paused_gc
from lightning_megatron.pipeline.schedule import COMPUTES, MESSAGES, Action, Kind, ScheduleError

__all__ = ["Costs", "ScheduleError", "Span", "Timeline", "check", "play"]

# The computes after which an activation is not needed any more.
_LAST_USE = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The time that each action takes, in one unit of the caller's choice; actions not named here take none."""

    forward: float = 1.0
    """The forward of one microbatch through one stage."""
    backward: float = 2.0
    """The full backward of one microbatch through one stage."""
    backward_input: float = 1.0
    """dgrad: the part of a backward that makes the gradient of the stage's input."""
    backward_weight: float = 1.0
    """wgrad: the part of a backward that makes the gradients of the stage's weights."""
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
    """A plan as `play` played it, one entry per rank."""

    spans: tuple[tuple[Span, ...], ...]
    """The computes of each rank, in order."""
    makespan: float
    """From the start of the first step to the end of the last, in the unit of the costs."""
    bubbles: tuple[float, ...]
    """The share of the makespan in which a rank computes nothing, 0 to 1."""
    bubble: float
    """Their mean."""
    peak_activations: tuple[int, ...]
    """The most (stage, microbatch) pairs whose activations a rank saves at one time."""


@paused_gc()
def check(plan: Plan) -> None:
    """Returns only if the plan runs to its end, each compute once and on inputs that have arrived.

    Raises ScheduleError with the rank, the step, the action and a grid of all ranks with the step marked, when a stage
    lacks a forward, or a backward in a plan that has backwards; when an action stands twice, before what it needs, or
    on another rank than its stage; when a send lacks its receive or the reverse; when the two ends of a lane post its
    messages in different orders; when a send is held to have left before it is certain; when ranks wait for each other
    for ever (by the rules of the note above).
    """
    require_consistent(plan)
    walk = _Walk(plan, Costs())
    walk.run()
    walk.require_end()


@paused_gc()
def play(plan: Plan, costs: Costs | Sequence[Costs] | None = None) -> Timeline:
    """The timeline of a plan, or of an order of computes alone, with these costs (`Costs()` if none are given), alike
    for all stages or by stage; a message takes as long as the first stage says.

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
            tuple(map(Span, computes, starts, ends))
            for computes, starts, ends in zip(walk.computes, walk.starts, walk.ends, strict=True)
        ),
        makespan=makespan,
        bubbles=bubbles,
        bubble=sum(bubbles) / len(bubbles),
        peak_activations=tuple(map(_peak_activations, walk.computes)),
    )


def _peak_activations(computes: list[Action]) -> int:
    """The most activations alive at one time; without a backward an activation lives as long as its forward."""
    saved_until_backward = {cell_key(c.stage, c.microbatch) for c in computes if c.kind in _LAST_USE}
    alive, peak = 0, 0
    for compute in computes:
        if compute.kind is Kind.FORWARD:
            peak = max(peak, alive + 1)
            alive += cell_key(compute.stage, compute.microbatch) in saved_until_backward
        elif compute.kind in _LAST_USE:
            alive -= 1
    return peak


@dataclass(slots=True)
class _Lane:
    """Messages that the two ends have posted and that have not landed, in order, and when; and the last landing."""

    sent: deque[tuple[MessageKey, float]] = field(default_factory=deque)
    received: deque[tuple[MessageKey, float]] = field(default_factory=deque)
    clock: float = 0.0

    def end_of(self, message: Action) -> deque[tuple[MessageKey, float]]:
        return self.sent if message.kind in SENDS else self.received


@dataclass(slots=True)
class _Results:
    """Ends of a stage's forwards or backwards by microbatch, and which rank waits for one."""

    ended: dict[int, float] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)


class _Walk:
    """One run through a plan: which rank is where, and when.

    Event-driven: `ready` holds the ranks that can take a step. A rank that cannot leaves it, and what it waits for puts
    it back, so the work is proportional to the number of actions, not to that times the ranks.
    """

    def __init__(self, plan: Plan, costs: Costs | Sequence[Costs]) -> None:
        self.plan = plan
        self.ranks = rank_of_stage(plan)
        by_stage = [costs] * len(self.ranks) if isinstance(costs, Costs) else costs
        assert len(by_stage) == len(self.ranks), f"costs of {len(by_stage)} stages for a plan of {len(self.ranks)}"
        self.message_cost = by_stage[0].message if by_stage else 0.0
        self.cost_of = [
            {
                Kind.FORWARD: own.forward,
                Kind.BACKWARD: own.backward,
                Kind.BACKWARD_INPUT: own.backward_input,
                Kind.BACKWARD_WEIGHT: own.backward_weight,
            }
            for own in by_stage
        ]
        # Where a rank waits, or stands at its end.
        self.positions = [0] * len(plan)
        self.clocks = [0.0] * len(plan)
        # Of each rank, in order.
        self.computes: list[list[Action]] = [[] for _ in plan]
        self.starts: list[list[float]] = [[] for _ in plan]
        self.ends: list[list[float]] = [[] for _ in plan]
        self.ready = list(range(len(plan)))
        self.lanes: defaultdict[Lane, _Lane] = defaultdict(_Lane)
        # The same by the kind and stage of a message, which are quick to look up, and the posts of its own end.
        self.lanes_of: dict[tuple[Kind, int], tuple[_Lane, deque[tuple[MessageKey, float]]]] = {}
        # When a message landed, and which rank it holds up.
        self.landed: dict[MessageKey, float] = {}
        self.awaiting: dict[MessageKey, int] = {}
        # Of each stage, its forwards (True) and its backwards. Each has at most one reader.
        self.results: defaultdict[tuple[int, bool], _Results] = defaultdict(_Results)

    def run(self) -> None:
        """Goes on until no rank can take a step: all at their end, or stuck."""
        steps = [self._steps_of(rank) for rank in range(len(self.plan))]
        while self.ready:
            next(steps[self.ready.pop()], None)

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

    def _steps_of(self, rank: int) -> Iterator[None]:
        """Takes the steps of a rank; yields where it has to wait, and goes on when what it waits for is there."""
        clock = 0.0
        computes, starts, ends = self.computes[rank], self.starts[rank], self.ends[rank]
        rules: dict[tuple[Kind, int], tuple[float, _Results | None, float, _Results | None]] = {}
        for position, step in enumerate(self.plan[rank]):
            if isinstance(step, P2PBatch):
                self._post(step.posted, clock)
                for message in step.awaited:
                    key = message_key(message)
                    if key not in self.landed:
                        self.positions[rank] = position
                        self.awaiting[key] = rank
                        yield
                    clock = max(clock, self.landed[key])
                continue
            if step.kind not in COMPUTES:
                if step.kind in MESSAGES:
                    # There is no such receive: `check` reports it.
                    self.positions[rank] = position
                    yield
                continue
            rule = rules.get((step.kind, step.stage))
            if rule is None:
                rule = rules[step.kind, step.stage] = self._rule_of(rank, step)
            cost, source, delay, made = rule
            microbatch = step.microbatch
            if source is not None:
                if microbatch not in source.ended:
                    self.positions[rank] = position
                    source.waiting[microbatch] = rank
                    yield
                clock = max(clock, source.ended[microbatch] + delay)
            computes.append(step)
            starts.append(clock)
            clock += cost
            ends.append(clock)
            if made is not None:
                made.ended[microbatch] = clock
                if microbatch in made.waiting:
                    self.ready.append(made.waiting.pop(microbatch))
        self.positions[rank] = len(self.plan[rank])
        self.clocks[rank] = clock

    def _rule_of(self, rank: int, compute: Action) -> tuple[float, _Results | None, float, _Results | None]:
        """Cost of computes of this kind and stage, what they read, how long that takes to come, and what they make."""
        kind, stage = compute.kind, compute.stage
        cost = self.cost_of[stage][kind]
        is_forward = kind is Kind.FORWARD
        if kind is Kind.BACKWARD_WEIGHT:
            return cost, None, 0.0, None
        made = self.results[stage, is_forward]
        source = stage - 1 if is_forward else stage + 1
        if not 0 <= source < len(self.ranks):
            return cost, None, 0.0, made
        delay = self.message_cost if self.ranks[source] != rank else 0.0
        return cost, self.results[source, is_forward], delay, made

    def _post(self, messages: tuple[Action, ...], clock: float) -> None:
        """Posts messages at one end, and lands those of their lanes that both ends have posted, in order."""
        for message in messages:
            lane, posts = self._lane_of(message)
            posts.append((message_key(message), clock))
            while lane.sent and lane.received:
                key, sent_at = lane.sent.popleft()
                _, received_at = lane.received.popleft()
                lane.clock = self.landed[key] = max(sent_at, received_at, lane.clock) + self.message_cost
                if key in self.awaiting:
                    self.ready.append(self.awaiting.pop(key))

    def _lane_of(self, message: Action) -> tuple[_Lane, deque[tuple[MessageKey, float]]]:
        """The lane of a message, and what the message's end has posted of it."""
        found = self.lanes_of.get((message.kind, message.stage))
        if found is None:
            lane = self.lanes[lane_of(message, self.ranks)]
            found = self.lanes_of[message.kind, message.stage] = lane, lane.end_of(message)
        return found

    def _blocked(self, rank: int) -> Action:
        """The action of a stuck rank that cannot go on: a compute, or a receive that does not land."""
        step = self.plan[rank][self.positions[rank]]
        if isinstance(step, Action):
            return step
        return next(message for message in step.awaited if message_key(message) not in self.landed)

    def _awaited(self, rank: int) -> Action:
        """The action that a stuck rank waits for: the other end of its lane's next message, or the compute it reads."""
        blocked = self._blocked(rank)
        if blocked.kind in MESSAGES:
            key, _ = self._lane_of(blocked)[0].received[0]
            posted = (m for step in self.plan[rank] if isinstance(step, P2PBatch) for m in step.posted)
            return other_end(next(m for m in posted if m.kind not in SENDS and message_key(m) == key))
        step_back = -1 if blocked.kind is Kind.FORWARD else 1
        return Action(blocked.kind, blocked.stage + step_back, blocked.microbatch)
