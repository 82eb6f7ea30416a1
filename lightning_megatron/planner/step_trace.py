"""A step of a rank as a trace, segment by segment, and the step of all microbatches that is composed from it.

What a rank holds is the sum of what its microbatches hold in its stages, and each of these cells goes through events of
its own. So one cell stands for all others of its kind, on any rank with equal stages: a trace has those that stand for
others, and a walk over a rank's plan composes the step. The first and the last microbatch stand for themselves.

Events and cells are named by the index of a stage among the rank's own.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from lightning_megatron.pipeline.lower import P2PBatch, Step
from lightning_megatron.pipeline.schedule import WHOLE_STAGE, Action, Kind
from lightning_megatron.planner.fake_process_group import MessageCounts, Messages
from lightning_megatron.planner.memory_tracker import HOST, OTHERS

_FORWARDS = (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD)
_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
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
    counts: Mapping[str, float]
    """What its kernels take, as in `kernel_counts`."""
    messages: MessageCounts
    module: str
    """Path of the module that computes; empty where that is not asked."""

    @cached_property
    def changed_bytes(self) -> int:
        return sum(self.change.values()) - self.change.get(HOST, 0)

    @cached_property
    def peak_bytes(self) -> int:
        return sum(self.peak.values()) - self.peak.get(HOST, 0)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The measured step of one rank."""

    held: Mapping[str, int]
    """Bytes by kind before the step."""
    pieces: tuple[tuple[Segment, ...], ...]
    """In turn segments outside of plans, and those of a batch's plan."""


@dataclass
class Work:
    """FLOPs, what kernels take, and messages."""

    flops: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    messages: dict[tuple[str, str], Messages] = field(default_factory=dict)

    def of_each(self, number: int) -> "Work":
        """The work of one of so many parts that are alike."""
        return Work(
            flops={kind: size / number for kind, size in self.flops.items()},
            counts={kind: size / number for kind, size in self.counts.items()},
            messages={
                key: Messages(
                    number=one.number // number,
                    tensor_bytes=one.tensor_bytes / number,
                    sent_bytes=one.sent_bytes / number,
                )
                for key, one in self.messages.items()
            },
        )

    def add(self, other: "Segment | Work", times: int = 1) -> None:
        """Adds other work, so many times."""
        for own, added in ((self.flops, other.flops), (self.counts, other.counts)):
            for kind, number in added.items():
                own[kind] = own.get(kind, 0) + number * times
        for key, messages in other.messages.items():
            self.messages[key] = self.messages.get(key, Messages()) + messages * times


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that a rank holds in a step."""

    by_kind: Mapping[str, int]
    """Bytes that the device holds at the peak, by kind."""
    host_bytes: int
    """The most that is in host memory at a time, between two pieces of the step."""
    saved_bytes: int
    """Bytes without a kind that are held between two events, such as activations."""
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
    # What is sent last is freed when the plan has ended.
    sent = [one.action for one in found if one.phase == "posted" and one.action.kind in _SENDS]
    released = {one.action for one in found if one.phase == "released"}
    return found + [Event("released", one) for one in sent if one not in released]


Cell = tuple[int, int]
"""A stage of a rank and a microbatch."""


def cell_of(action: Action) -> Cell:
    """The cell that an action belongs to; the microbatch of what concerns a stage as a whole is WHOLE_STAGE."""
    return action.stage, action.microbatch


def kinds_of(events: Sequence[Event], count: int, stages: Sequence[object] | None) -> dict[Cell, object]:
    """What each cell of `count` microbatches must have in common with the one that stands for it.

    `stages` are equal for stages that do the same, and get all that they read by messages; None: stages of a rank hand
    tensors to each other, so a microbatch is of one kind in all. The computes of a cell come in one order, and a send
    that is released has no part in what is saved for them, but for a gradient that deferred weight gradients read too.
    """
    own: defaultdict[Cell, list[tuple[Phase, str, int]]] = defaultdict(list)
    for phase, action in events:
        if action.microbatch != WHOLE_STAGE:
            stage = action.stage if stages is None else 0
            own[action.stage if stages is not None else 0, action.microbatch].append((phase, action.kind.value, stage))
    found: dict[Cell, object] = {}
    for stage, number in dict.fromkeys(cell_of(event.action) for event in events):
        if number != WHOLE_STAGE:
            names = own[stage if stages is not None else 0, number]
            order = *sorted(names), *(name for name in names if _is_of_gradient(*name))
            found[stage, number] = (stage if stages is None else stages[stage], number == 0, number == count - 1, order)
    return found


def _is_of_gradient(phase: Phase, kind: str, stage: int) -> bool:
    return kind == Kind.BACKWARD_WEIGHT.value or (phase == "released" and kind == Kind.SEND_BACKWARD.value)


def with_only(steps: Sequence[Step], stages: Sequence[int], cells: Container[Cell]) -> tuple[Step, ...]:
    """The steps of these cells, and those of a stage as a whole."""

    def is_kept(action: Action) -> bool:
        return action.microbatch == WHOLE_STAGE or (stages.index(action.stage), action.microbatch) in cells

    found: list[Step] = []
    for step in steps:
        if isinstance(step, P2PBatch):
            kept = (tuple(filter(is_kept, some)) for some in (step.posted, step.awaited, step.released))
            batch = P2PBatch(*kept)
            found += [batch] if batch.posted or batch.awaited or batch.released else []
        elif is_kept(step):
            found.append(step)
    return tuple(found)


def peak_of(
    trace: Trace, events: Sequence[Event], stands_for: Mapping[Cell, Cell] | None, stages: Sequence[int]
) -> Peak:
    """The peak of a step of these events on a rank of these stages.

    Each cell does what its stand-in did; None: the trace has all cells.
    """
    walk = list(_walked(trace, events, stands_for))
    on_host = most_on_host = trace.held.get(HOST, 0)
    held, most, at = sum(trace.held.values()) - on_host, -1, 0
    for number, (_, _, segment) in enumerate(walk):
        on_host += segment.change.get(HOST, 0)
        most_on_host = max(most_on_host, on_host)
        if held + segment.peak_bytes > most:
            most, at = held + segment.peak_bytes, number
        held += segment.changed_bytes
    before = Counter(trace.held)
    for _, _, segment in walk[:at]:
        before.update(segment.change)
    _, event, segment = walk[at]
    peak = {kind: before[kind] + more for kind, more in segment.peak.items() if kind != HOST}
    saved = min(max(before[OTHERS], before[OTHERS] + segment.change[OTHERS]), peak[OTHERS])
    action = segment.action if event is None else event.text(stages)
    return Peak(by_kind=peak, host_bytes=most_on_host, saved_bytes=saved, action=action)


@dataclass(frozen=True, kw_only=True)
class Level:
    """Bytes by kind that a rank holds in a piece of a step."""

    event: Event | None
    """The compute, or the end of a message; None: the piece is outside of the microbatches."""
    batch: int
    """Number of the batch among those that ran, or of the first that comes after the piece."""
    peak: Mapping[str, int]
    after: Mapping[str, int]
    """Bytes at its end."""


def levels_of(trace: Trace, events: Sequence[Event], stands_for: Mapping[Cell, Cell] | None) -> list[Level]:
    """What a rank holds in each piece of a step of these events, in order."""
    held, found = Counter({kind: size for kind, size in trace.held.items() if kind != HOST}), []
    for batch, event, segment in _walked(trace, events, stands_for):
        peak = {kind: held[kind] + more for kind, more in segment.peak.items() if kind != HOST}
        held.update({kind: more for kind, more in segment.change.items() if kind != HOST})
        found.append(Level(event=event, batch=batch, peak=peak, after=dict(held)))
    return found


def _walked(
    trace: Trace, events: Sequence[Event], stands_for: Mapping[Cell, Cell] | None
) -> Iterator[tuple[int, Event | None, Segment]]:
    """The segments of a step in order, each with the number of its batch and its event."""
    for index, piece in enumerate(trace.pieces):
        if stands_for is None or index % 2 == 0:
            yield from ((index // 2, segment.event, segment) for segment in piece)
            continue
        by_event: defaultdict[Event | None, list[Segment]] = defaultdict(list)
        for segment in piece:
            by_event[segment.event].append(segment)
        yield from ((index // 2, None, segment) for segment in by_event[None])
        for event in events:
            cell = cell_of(event.action)
            known = Event(event.phase, Action(event.action.kind, *stands_for.get(cell, cell)))
            yield from ((index // 2, event, segment) for segment in by_event[known])


Passes = tuple[Work, Work]
"""What a forward does, and what its backward does."""


def passes_of(trace: Trace, cells: Sequence[Cell]) -> dict[str, Passes]:
    """What the forwards and the backwards of these cells of a trace do in its first batch, by module."""
    found: defaultdict[str, Passes] = defaultdict(lambda: (Work(), Work()))
    for segment in trace.pieces[1]:
        if segment.event is not None and (times := cells.count(cell_of(segment.event.action))):
            # Whatever runs while a message is under way is no part of a pass.
            own = segment if segment.event.phase == "computed" else replace(segment, counts={})
            found[segment.module][segment.event.action.kind not in _FORWARDS].add(own, times)
    return dict(found)


def flops_of(trace: Trace, action: str) -> float:
    """FLOPs of the pieces of a trace with that name."""
    return sum(sum(one.flops.values()) for piece in trace.pieces for one in piece if one.action == action)


def works_of(trace: Trace) -> dict[tuple[int, Cell | None], Work]:
    """What each cell of a trace does in each batch; all else has no cell."""
    works: defaultdict[tuple[int, Cell | None], Work] = defaultdict(Work)
    for index, piece in enumerate(trace.pieces):
        for segment in piece:
            event = segment.event
            is_in_cell = event is not None and event.action.microbatch != WHOLE_STAGE
            works[(index // 2, cell_of(event.action)) if event is not None and is_in_cell else (0, None)].add(segment)
    return works
