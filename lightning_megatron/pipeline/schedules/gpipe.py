"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from lightning_megatron.pipeline.schedule import Order, backward_chunks, forward_chunks, require_counts
from lightning_megatron.pipeline.schedule_spec import Formula, Schedule, ScheduleSpec
from lightning_megatron.pipeline.simulate import Costs


def gpipe(*, pp: int, chunks: int, microbatches: int) -> Order:
    """The GPipe order, stage s on rank s % pp: all forwards, chunk after chunk, then all backwards, last chunk first.

    A rank saves the activations of all its chunks and microbatches. With at least pp microbatches the bubble is
    (pp - 1)/(chunks * microbatches + pp - 1).
    Raises ValueError for fewer than one rank, chunk or microbatch.
    Source: Huang et al. 2019, GPipe, section 2; with chunks: Lamy-Poirier 2023, Breadth-First Pipeline Parallelism.
    """
    require_counts(pp=pp, chunks=chunks, microbatches=microbatches)
    ranks = tuple(stage % pp for stage in range(pp * chunks))
    forwards = forward_chunks(ranks=ranks, microbatches=microbatches)
    backwards = backward_chunks(ranks=ranks, microbatches=microbatches)
    return tuple(forwards[rank] + backwards[rank] for rank in range(pp))


def _bubble(schedule: Schedule, costs: Costs) -> Formula | None:
    p, v, m = schedule.pp, schedule.chunks, schedule.microbatches
    if v > 1 and m < p:
        return None
    text = "(p - 1)/(m + p - 1)" if v == 1 else "(p - 1)/(v m + p - 1)"
    return Formula(text=text, bubble=(p - 1) / (v * m + p - 1))


GPIPE = ScheduleSpec(
    name="gpipe",
    make=lambda schedule: gpipe(pp=schedule.pp, chunks=schedule.chunks, microbatches=schedule.microbatches),
    bubble=_bubble,
    steady_after=lambda schedule: schedule.microbatches,
)
