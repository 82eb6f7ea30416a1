"""Which schedule a step runs, as a value: its name and sizes, the rules that they must keep, and the order they make.

Before a step: the configuration chooses, the planner asks for faults, and `order_of` goes to the maker of that name.

| name        | maker                                   | chunks | placement |
|-------------|-----------------------------------------|--------|-----------|
| gpipe       | `schedule.gpipe`                        | any    | loop      |
| 1f1b        | `schedule.one_f_one_b`                  | 1      | loop      |
| interleaved | `interleaved.interleaved_one_f_one_b`   | from 2 | loop      |
| zb_h1       | `zero_bubble.zb_h1`                     | 1      | loop      |
| zb_v        | `zero_bubble.zb_v`                      | 2      | v         |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_megatron.mesh import Placement
from lightning_megatron.pipeline.interleaved import interleaved_one_f_one_b
from lightning_megatron.pipeline.overlapped_1f1b import overlapped_one_f_one_b
from lightning_megatron.pipeline.paused_gc import paused_gc
from lightning_megatron.pipeline.schedule import Action, Order, gpipe, one_f_one_b
from lightning_megatron.pipeline.zero_bubble import zb_h1, zb_v

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule and its sizes; `schedule_faults` says what does not fit together."""

    name: ScheduleName
    """Of the order."""
    pp: int
    """Ranks of the pipeline."""
    chunks: int
    """Stages on each of them."""
    microbatches: int
    """Of a step."""
    group_size: int = 0
    """Microbatches that go through a chunk before the next chunk's turn, interleaved only; 0: pp."""
    is_overlapped: bool = False
    """A forward and a backward run side by side, 1f1b and interleaved only."""


@paused_gc()
def order_of(schedule: Schedule) -> Order:
    """The order of a schedule. Raises ValueError with all of its faults."""
    if faults := schedule_faults(schedule):
        raise ValueError("; ".join(faults))
    pp, chunks, microbatches = schedule.pp, schedule.chunks, schedule.microbatches
    group_size = schedule.group_size or pp
    if schedule.is_overlapped:
        order, _ = overlapped_one_f_one_b(pp=pp, chunks=chunks, microbatches=microbatches, group_size=group_size)
        return order
    match schedule.name:
        case "gpipe":
            return gpipe(pp=pp, chunks=chunks, microbatches=microbatches)
        case "1f1b":
            return one_f_one_b(pp=pp, microbatches=microbatches)
        case "interleaved":
            return interleaved_one_f_one_b(pp=pp, chunks=chunks, microbatches=microbatches, group_size=group_size)
        case "zb_h1":
            return zb_h1(pp=pp, microbatches=microbatches)
        case "zb_v":
            return zb_v(pp=pp, microbatches=microbatches)


def overlapped_forwards(schedule: Schedule) -> frozenset[Action]:
    """The forwards of a schedule that run side by side with the backward behind them."""
    if not schedule.is_overlapped:
        return frozenset()
    pp, group_size = schedule.pp, schedule.group_size or schedule.pp
    _, joint = overlapped_one_f_one_b(
        pp=pp, chunks=schedule.chunks, microbatches=schedule.microbatches, group_size=group_size
    )
    return joint


def placement_of(name: ScheduleName) -> Placement:
    """Where a schedule wants the stages."""
    return "v" if name == "zb_v" else "loop"


def in_groups_of(schedule: Schedule) -> int:
    """Of how many microbatches a schedule takes each chunk in turn: a last group that is not full leaves ranks idle."""
    return (schedule.group_size or schedule.pp) if schedule.name == "interleaved" else 1


def schedule_faults(schedule: Schedule) -> list[str]:
    """Every rule that a schedule breaks, one sentence each. Any number of microbatches from 1 fits every schedule."""
    name, pp, chunks = schedule.name, schedule.pp, schedule.chunks
    if name not in get_args(ScheduleName):
        return [f"schedule ({name!r}) must be one of {', '.join(get_args(ScheduleName))}"]
    faults = [
        f"{count} ({size}) must be at least 1"
        for count, size in (("pp", pp), ("chunks", chunks), ("microbatches", schedule.microbatches))
        if size < 1
    ]
    if chunks >= 1:
        faults += _chunk_faults(schedule)
    if schedule.is_overlapped and name not in ("1f1b", "interleaved"):
        faults.append(f"schedule {name} does not run a forward beside a backward; use 1f1b or interleaved for that")
    return faults + _group_faults(schedule)


def _chunk_faults(schedule: Schedule) -> list[str]:
    name, pp, chunks = schedule.name, schedule.pp, schedule.chunks
    faults = []
    if name in ("1f1b", "zb_h1") and chunks != 1:
        others = "interleaved or gpipe" if name == "1f1b" else "zb_v (with 2 chunks) or interleaved"
        faults.append(f"chunks ({chunks}) must be 1 for schedule {name}; use 1, or schedule {others}")
    if name == "zb_v" and chunks != 2:
        faults.append(f"chunks ({chunks}) must be 2 for schedule zb_v; use 2, or schedule zb_h1 with 1")
    if name == "interleaved" and chunks == 1:
        faults.append("chunks (1) must be at least 2 for schedule interleaved; use 2 or more, or schedule 1f1b")
    if name == "interleaved" and pp == 1:
        faults.append(
            "pp (1) must be at least 2 for schedule interleaved; use 2 or more, or schedule 1f1b with 1 chunk"
        )
    return faults


def _group_faults(schedule: Schedule) -> list[str]:
    group_size, pp = schedule.group_size, schedule.pp
    if schedule.name != "interleaved":
        fault = f"group_size ({group_size}) belongs to schedule interleaved; use 0 with schedule {schedule.name}"
        return [fault] if group_size else []
    if group_size and group_size < pp:
        return [f"group_size ({group_size}) must be at least pp ({pp}); use 0, which means {pp}, or {pp} or more"]
    return []
