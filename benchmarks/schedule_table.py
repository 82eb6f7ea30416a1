"""Schedules side by side: bubble, time of the step and activations of each, by the simulator."""

from dataclasses import dataclass

from lightning_megatron.pipeline.bubble import peak_shares, timeline_of
from lightning_megatron.pipeline.registry import SCHEDULES, default_name
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.simulate import Costs


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """Costs of a schedule, and relative to the default schedule of as many ranks and microbatches."""

    schedule: Schedule
    bubble: float
    """Share of the makespan, mean over the ranks."""
    makespan: float
    """Time of the step, in the unit of the costs."""
    relative_time: float
    """Makespan over that of the default schedule."""
    peak_shares: float
    """The most activations that any rank saves, in those of one microbatch through all layers of a rank."""


def schedule_table(pp: int, microbatches: int, costs: Costs | None = None) -> list[TableRow]:
    """A row for each schedule that takes so few microbatches, that of one chunk without a choice first, and for twice
    as many chunks as it needs where it takes any number above one; costs as for `timeline_of`, `Costs()` if not given.

    Raises ValueError for fewer than two ranks or one microbatch.
    """
    costs = Costs() if costs is None else costs
    first = default_name(1)
    schedules = [
        Schedule(name=spec.name, pp=pp, chunks=chunks, microbatches=microbatches)
        for spec in sorted(SCHEDULES.values(), key=lambda spec: spec.name != first)
        for chunks in ((spec.min_chunks, 2 * spec.min_chunks) if spec.has_groups else (spec.min_chunks,))
    ]
    timelines = [timeline_of(schedule, costs) for schedule in schedules]
    return [
        TableRow(
            schedule=schedule,
            bubble=timeline.bubble,
            makespan=timeline.makespan,
            relative_time=timeline.makespan / timelines[0].makespan,
            peak_shares=max(peak_shares(timeline, schedule.chunks)),
        )
        for schedule, timeline in zip(schedules, timelines, strict=True)
    ]
