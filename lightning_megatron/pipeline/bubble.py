"""The timeline of a schedule, from which its bubble and its activations are read.

Above `registry`, `lower` and `simulate`: it serves the choice of a schedule.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_megatron.pipeline.lower import lower
from lightning_megatron.pipeline.registry import order_of, overlapped_forwards
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.simulate import Costs, Timeline, play


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
    """The most activations that each rank saves, in those of one microbatch through all of its layers."""
    return tuple(peak / chunks for peak in timeline.peak_activations)


def _of_chunk(costs: Costs, chunks: int) -> Costs:
    return replace(
        costs,
        forward=costs.forward / chunks,
        backward=costs.backward / chunks,
        backward_input=costs.backward_input / chunks,
        backward_weight=costs.backward_weight / chunks,
    )
