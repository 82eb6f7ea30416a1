"""A step of a rank as a trace, segment by segment, and the step of all microbatches that is composed from it.

What a rank holds is the sum of what its microbatches hold, and each of these goes through events of its own. So one
microbatch stands for all others of its kind, on any rank with equal stages: a trace has those that stand for others,
and a walk over a rank's plan composes the step. The first and the last microbatch stand for themselves.

Events are named by the index of a stage among the rank's own.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from lightning_megatron.pipeline.lower import P2PBatch, Step
from lightning_megatron.pipeline.schedule import WHOLE_STAGE, Action, Kind
from lightning_megatron.planner.fake_process_group import MessageCounts, Messages
from lightning_megatron.planner.memory_tracker import OTHERS

Phase = Literal["computed", "posted", "awaited", "released"]
_TEXTS = {
    Kind.FORWARD: "the forward",
    Kind.BACKWARD: "the backward",
    Kind.BACKWARD_INPUT: "the backward for the input",
    Kind.BACKWARD_WEIGHT: "the backward for the weights",
}


class Event(NamedTuple):
    """A compute of a plan, or one end of the life of a message."""

    phase: Phase
    action: Action

    def text(self, stages: Sequence[int]) -> str:
        """The event in words, on a rank of these stages."""
        kind, stage, microbatch = self.action.kind, stages[self.action.stage], self.action.microbatch
        if kind in _TEXTS:
            return f"{_TEXTS[kind]} of microbatch {microbatch} through stage {stage}"
        if kind is Kind.REDUCE_GRADS:
            return "the reduction of gradients"
        if kind is Kind.GATHER_PARAMS:
            return "the gather of parameters"
        return f"a message of microbatch {microbatch} at stage {stage}"


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A piece of a step: from one event to the next."""

    event: Event | None
    """None: the piece is outside of the microbatches."""
    action: str
    """The piece in words, where there is no event."""
    change: Mapping[str, int]
    """Bytes by kind that are held after it, beyond those before it."""
    peak: Mapping[str, int]
    """Bytes by kind at its peak, beyond those before it."""
    flops: Mapping[str, float]
    messages: MessageCounts

    @cached_property
    def changed_bytes(self) -> int:
        return sum(self.change.values())

    @cached_property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The measured step of one rank."""

    held: Mapping[str, int]
    """Bytes by kind before the step."""
    pieces: tuple[tuple[Segment, ...], ...]
    """In turn segments outside of plans, and those of a batch's plan."""


@dataclass
class Work:
    """FLOPs and messages."""

    flops: dict[str, float] = field(default_factory=dict)
    messages: dict[tuple[str, str], Messages] = field(default_factory=dict)

    def add(self, other: "Segment | Work", times: int = 1) -> None:
        """Adds other work, so many times."""
        for kind, flops in other.flops.items():
            self.flops[kind] = self.flops.get(kind, 0) + flops * times
        for key, messages in other.messages.items():
            self.messages[key] = self.messages.get(key, Messages()) + messages * times


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that a rank holds in a step."""

    by_kind: Mapping[str, int]
    saved_bytes: int
    """Those that are held between events, of what has no kind."""
    action: str
    """In words."""


def events_of(steps: Sequence[Step], stages: Sequence[int]) -> list[Event]:
    """The events of a rank's steps, in order."""

    def events(phase: Phase, *actions: Action) -> list[Event]:
        return [Event(phase, Action(one.kind, chunks[one.stage], one.microbatch)) for one in actions]

    chunks = {stage: chunk for chunk, stage in enumerate(stages)}

    found: list[Event] = []
    for step in steps:
        if isinstance(step, P2PBatch):
            found += events("posted", *step.posted) + events("awaited", *step.awaited)
            found += events("released", *step.released)
        else:
            found += events("computed", step)
    return found


def kinds_of(events: Sequence[Event], count: int) -> list[tuple[object, ...]]:
    """What each of `count` microbatches must have in common with the one that stands for it.

    Its own computes come in one order in all microbatches, and a send that is released has no part in what is saved for
    them, but for a gradient that a deferred weight gradient reads too.
    """
    own: list[list[tuple[Phase, str, int]]] = [[] for _ in range(count)]
    for phase, action in events:
        if action.microbatch != WHOLE_STAGE:
            own[action.microbatch].append((phase, action.kind.value, action.stage))
    return [
        (number == 0, number == count - 1, *sorted(names), *(name for name in names if _is_of_gradient(*name)))
        for number, names in enumerate(own)
    ]


def _is_of_gradient(phase: Phase, kind: str, stage: int) -> bool:
    return kind == Kind.BACKWARD_WEIGHT.value or (phase == "released" and kind == Kind.SEND_BACKWARD.value)


def with_only(steps: Sequence[Step], microbatches: frozenset[int]) -> tuple[Step, ...]:
    """The steps of these microbatches, and those of a stage as a whole."""

    def own(messages: tuple[Action, ...]) -> tuple[Action, ...]:
        return tuple(message for message in messages if message.microbatch in microbatches)

    found: list[Step] = []
    for step in steps:
        if isinstance(step, P2PBatch):
            batch = P2PBatch(own(step.posted), own(step.awaited), own(step.released))
            found += [batch] if batch.posted or batch.awaited or batch.released else []
        elif step.microbatch in microbatches or step.microbatch == WHOLE_STAGE:
            found.append(step)
    return tuple(found)


def peak_of(trace: Trace, events: Sequence[Event], stands_for: Sequence[int] | None, stages: Sequence[int]) -> Peak:
    """The peak of a step of these events on a rank of these stages.

    Each microbatch does what its stand-in did; None: the trace has all microbatches.
    """
    walk = list(_walked(trace, events, stands_for))
    held, most, at = sum(trace.held.values()), -1, 0
    for number, (_, segment) in enumerate(walk):
        if held + segment.peak_bytes > most:
            most, at = held + segment.peak_bytes, number
        held += segment.changed_bytes
    before = Counter(trace.held)
    for _, segment in walk[:at]:
        before.update(segment.change)
    event, segment = walk[at]
    peak = {kind: before[kind] + more for kind, more in segment.peak.items()}
    saved = min(max(before[OTHERS], before[OTHERS] + segment.change[OTHERS]), peak[OTHERS])
    return Peak(by_kind=peak, saved_bytes=saved, action=segment.action if event is None else event.text(stages))


def _walked(
    trace: Trace, events: Sequence[Event], stands_for: Sequence[int] | None
) -> Iterator[tuple[Event | None, Segment]]:
    """The segments of a step in order, each with its event."""
    for index, piece in enumerate(trace.pieces):
        if stands_for is None or index % 2 == 0:
            yield from ((segment.event, segment) for segment in piece)
            continue
        by_event: defaultdict[Event | None, list[Segment]] = defaultdict(list)
        for segment in piece:
            by_event[segment.event].append(segment)
        yield from ((None, segment) for segment in by_event[None])
        for event in events:
            action = event.action
            number = WHOLE_STAGE if action.microbatch == WHOLE_STAGE else stands_for[action.microbatch]
            known = Event(event.phase, Action(action.kind, action.stage, number))
            yield from ((event, segment) for segment in by_event[known])


def works_of(trace: Trace) -> dict[tuple[int, int], Work]:
    """What each microbatch of a trace does in each batch; all else counts for (-1, -1)."""
    works: defaultdict[tuple[int, int], Work] = defaultdict(Work)
    for index, piece in enumerate(trace.pieces):
        for segment in piece:
            number = WHOLE_STAGE if segment.event is None else segment.event.action.microbatch
            works[(-1, -1) if number == WHOLE_STAGE else (index // 2, number)].add(segment)
    return dict(works)
