"""How much of a step a schedule leaves idle: played, by formula, and schedules side by side.

Above `choice`, `lower` and `simulate`: what someone asks before choosing a schedule. With p ranks of v chunks and m
microbatches, the share of a step in which a rank computes nothing is

| schedule            | bubble                    | if                                                        |
|---------------------|---------------------------|-----------------------------------------------------------|
| gpipe               | (p - 1)/(v m + p - 1)     | v = 1, or m >= p                                          |
| 1f1b                | (p - 1)/(m + p - 1)       |                                                           |
| interleaved         | (p - 1)/(v m + p - 1)     | each group has p microbatches or more, and all as many    |
|                     |                           | or B >= F                                                 |
| zb_h1               | (p - 1)/(3 m + p - 1)     | m >= p; F, I and W cost the same                          |
| zb_v                | (p - 1)/(6 m + p - 1)     | m >= 3p/2, rounded down; F, I and W cost the same         |

and messages take no time. Sources: see the makers of the orders.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_megatron.pipeline.choice import Schedule, ScheduleName, order_of, overlapped_forwards
from lightning_megatron.pipeline.lower import lower
from lightning_megatron.pipeline.simulate import Costs, Timeline, play

# The rows of the table: a schedule and its chunks.
_TABLE: tuple[tuple[ScheduleName, int], ...] = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zb_h1", 1),
    ("zb_v", 2),
)


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A bubble in closed form."""

    text: str
    """In p ranks, v chunks on each, m microbatches."""
    bubble: float
    """Its value, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """What a schedule costs, beside 1F1B of as many ranks and microbatches."""

    schedule: Schedule
    bubble: float
    """Share of the makespan, mean over the ranks."""
    makespan: float
    """In the unit of the costs."""
    relative_time: float
    """Makespan over that of 1F1B."""
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


def bubble_formula(schedule: Schedule, costs: Costs) -> Formula | None:
    """The bubble in closed form, None where the condition of the formula is not kept."""
    p, v, m = schedule.pp, schedule.chunks, schedule.microbatches
    if costs.message > 0 and p > 1:
        return None
    are_alike = costs.forward == costs.backward_input == costs.backward_weight
    match schedule.name:
        case "1f1b":
            return Formula(text="(p - 1)/(m + p - 1)", bubble=(p - 1) / (m + p - 1))
        case "gpipe" if v == 1 or m >= p:
            text = "(p - 1)/(m + p - 1)" if v == 1 else "(p - 1)/(v m + p - 1)"
            return Formula(text=text, bubble=(p - 1) / (v * m + p - 1))
        case "interleaved" if _is_full(schedule, costs):
            return Formula(text="(p - 1)/(v m + p - 1)", bubble=(p - 1) / (v * m + p - 1))
        case "zb_h1" if are_alike and m >= p:
            return Formula(text="(p - 1)/(3 m + p - 1)", bubble=(p - 1) / (3 * m + p - 1))
        case "zb_v" if are_alike and m >= 3 * p // 2:
            return Formula(text="(p - 1)/(6 m + p - 1)", bubble=(p - 1) / (6 * m + p - 1))
    return None


def peak_shares(timeline: Timeline, chunks: int) -> tuple[float, ...]:
    """The most activations that each rank keeps, in those of one microbatch through all of its layers."""
    return tuple(peak / chunks for peak in timeline.peak_activations)


def schedule_table(pp: int, microbatches: int, costs: Costs | None = None) -> list[TableRow]:
    """A row for each schedule, 1F1B first; the costs as `timeline_of` reads them, `Costs()` if none are given.

    Raises ValueError for fewer than two ranks or one microbatch.
    """
    costs = Costs() if costs is None else costs
    schedules = [Schedule(name=name, pp=pp, chunks=chunks, microbatches=microbatches) for name, chunks in _TABLE]
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


def _is_full(schedule: Schedule, costs: Costs) -> bool:
    """Whether the groups of an interleaved schedule leave no gaps but at both ends of the step."""
    group_size = min(schedule.group_size or schedule.pp, schedule.microbatches)
    last_group = schedule.microbatches % group_size
    if last_group == 0:
        return group_size >= schedule.pp
    # Backwards shorter than forwards do not fill the place that the missing microbatches leave.
    return last_group >= schedule.pp and costs.backward >= costs.forward
