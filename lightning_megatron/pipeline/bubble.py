"""How much of a step a schedule leaves idle: played, by formula, and schedules side by side.

Above `registry`, `lower` and `simulate`: what someone asks before choosing a schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_megatron.pipeline.lower import lower
from lightning_megatron.pipeline.registry import SCHEDULES, default_name, order_of, overlapped_forwards, spec_of
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.simulate import Costs, Timeline, play


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """Costs of a schedule, beside the default schedule of as many ranks and microbatches."""

    schedule: Schedule
    bubble: float
    """Share of the makespan, mean over the ranks."""
    makespan: float
    """Time of the step, in the unit of the costs."""
    relative_time: float
    """Makespan over that of the default schedule."""
    peak_shares: float
    """The most activations that any rank keeps, in those of one microbatch through all layers of a rank."""


def timeline_of(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of a schedule's full plan.

    The costs are those of a microbatch through all layers of a rank, so that schedules of different chunks compare: a
    chunk takes its part of them. A message costs the same whatever the chunks.
    Raises ValueError with all faults of the schedule.
    """
    order = order_of(schedule)
    # Messages that take no time are there when they are made: a plan, much more work, has its order's timeline.
    plan = lower(order, overlapped_forwards(schedule)).plan if costs.message > 0 else order
    return play(plan, _of_chunk(costs, schedule.chunks))


def peak_shares(timeline: Timeline, chunks: int) -> tuple[float, ...]:
    """The most activations that each rank keeps, in those of one microbatch through all of its layers."""
    return tuple(peak / chunks for peak in timeline.peak_activations)


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
    schedules = [
        schedule
        for schedule in schedules
        if microbatches < 1 or microbatches >= spec_of(schedule.name).min_microbatches(schedule)
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


def _of_chunk(costs: Costs, chunks: int) -> Costs:
    return replace(
        costs,
        forward=costs.forward / chunks,
        backward=costs.backward / chunks,
        backward_input=costs.backward_input / chunks,
        backward_weight=costs.backward_weight / chunks,
    )
