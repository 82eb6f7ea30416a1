"""The registry of schedules: the one place that lists them, and look-ups of a schedule by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from lightning_megatron.pipeline.paused_gc import paused_gc
from lightning_megatron.pipeline.schedule import Action, Order
from lightning_megatron.pipeline.schedule_spec import Formula, Schedule, ScheduleSpec
from lightning_megatron.pipeline.schedules.dualpipe_v import DUALPIPE_V
from lightning_megatron.pipeline.schedules.gpipe import GPIPE
from lightning_megatron.pipeline.schedules.interleaved import INTERLEAVED
from lightning_megatron.pipeline.schedules.one_f_one_b import ONE_F_ONE_B
from lightning_megatron.pipeline.schedules.zero_bubble import ZB_H1, ZB_V
from lightning_megatron.pipeline.simulate import Costs

SCHEDULES = {spec.name: spec for spec in (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZB_V, DUALPIPE_V)}

if TYPE_CHECKING:
    from lightning_megatron.mesh import Placement

    ScheduleName = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]


def spec_of(name: str) -> ScheduleSpec:
    """The specification of a schedule. Raises ValueError with the known names for another one."""
    if name not in SCHEDULES:
        raise ValueError(_unknown(name))
    return SCHEDULES[name]


def default_name(chunks: int) -> str:
    """The schedule of a run that chooses none."""
    return (INTERLEAVED if chunks > 1 else ONE_F_ONE_B).name


def default_text(chunks: str) -> str:
    """The rule of `default_name` in words; `chunks` is what the reader calls the number of chunks."""
    return f"{ONE_F_ONE_B.name}, or {INTERLEAVED.name} where {chunks} is above 1"


def names_with(is_so: Callable[[ScheduleSpec], bool], conjunction: str = "or") -> str:
    """The names of the schedules of which something is so, as in "a, b or c"."""
    *names, last = [spec.name for spec in SCHEDULES.values() if is_so(spec)]
    return f"{', '.join(names)} {conjunction} {last}" if names else last


@paused_gc()
def order_of(schedule: Schedule) -> Order:
    """The order of a schedule. Raises ValueError with all of its faults."""
    if faults := schedule_faults(schedule):
        raise ValueError("; ".join(faults))
    spec = spec_of(schedule.name)
    if schedule.is_overlapped and spec.make_overlapped is not None:
        return spec.make_overlapped(schedule)[0]
    return spec.make(schedule)


def overlapped_forwards(schedule: Schedule) -> frozenset[Action]:
    """The forwards of a schedule that run side by side with the backward after them."""
    spec = spec_of(schedule.name)
    if not schedule.is_overlapped or spec.make_overlapped is None:
        return frozenset()
    return spec.make_overlapped(schedule)[1]


def placement_of(name: str) -> Placement:
    """The placement of stages that a schedule wants."""
    return spec_of(name).placement


def microbatch_multiple(schedule: Schedule) -> int:
    """The multiple of microbatches that a schedule wants: a last group that is not full leaves ranks idle."""
    return schedule.group if spec_of(schedule.name).has_groups else 1


def bubble_formula(schedule: Schedule, costs: Costs) -> Formula | None:
    """The bubble in closed form, None where there is none or its conditions are not met."""
    if costs.message > 0 and schedule.pp > 1:
        return None
    return spec_of(schedule.name).bubble(schedule, costs)


def schedule_faults(schedule: Schedule) -> list[str]:
    """Every rule that a schedule breaks, one sentence each."""
    spec = SCHEDULES.get(schedule.name)
    if spec is None:
        return [_unknown(schedule.name)]
    counts = (("pp", schedule.pp), ("chunks", schedule.chunks), ("microbatches", schedule.microbatches))
    faults = [f"{count} ({size}) must be at least 1" for count, size in counts if size < 1]
    if schedule.chunks >= 1:
        faults += _chunk_faults(schedule, spec)
    if schedule.is_overlapped and spec.make_overlapped is None:
        others = names_with(lambda other: other.make_overlapped is not None)
        faults.append(f"schedule {spec.name} does not run a forward beside a backward; use {others} for that")
    return faults + _group_faults(schedule, spec)


def _unknown(name: str) -> str:
    return f"schedule ({name!r}) must be one of {', '.join(SCHEDULES)}"


def _takes(spec: ScheduleSpec, chunks: int) -> bool:
    return spec.min_chunks <= chunks and (spec.max_chunks is None or chunks <= spec.max_chunks)


def _chunk_faults(schedule: Schedule, spec: ScheduleSpec) -> list[str]:
    name, pp, chunks = spec.name, schedule.pp, schedule.chunks
    faults = []
    if not _takes(spec, chunks):
        is_range = spec.max_chunks is None
        rule = f"at least {spec.min_chunks}" if is_range else f"{spec.min_chunks}"
        fits = f"{spec.min_chunks} or more" if is_range else f"{spec.min_chunks}"
        others = names_with(lambda other: _takes(other, chunks) and max(pp, 1) >= other.min_pp)
        faults.append(f"chunks ({chunks}) must be {rule} for schedule {name}; use {fits}, or schedule {others}")
    if 1 <= pp < spec.min_pp:
        others = names_with(lambda other: _takes(other, chunks) and max(pp, 1) >= other.min_pp)
        faults.append(
            f"pp ({pp}) must be at least {spec.min_pp} for schedule {name}; use {spec.min_pp} or more, or schedule "
            f"{others}"
        )
    return faults


def _group_faults(schedule: Schedule, spec: ScheduleSpec) -> list[str]:
    group_size, pp = schedule.group_size, schedule.pp
    if not spec.has_groups:
        owner = names_with(lambda other: other.has_groups)
        fault = f"group_size ({group_size}) belongs to schedule {owner}; use 0 with schedule {spec.name}"
        return [fault] if group_size else []
    if group_size and group_size < pp:
        return [f"group_size ({group_size}) must be at least pp ({pp}); use 0, which means {pp}, or {pp} or more"]
    return []
