"""1F1B: forwards to fill the pipeline, then one forward and one backward in turn, then the backwards that are left."""

from __future__ import annotations

from lightning_megatron.pipeline.schedule import Action, Kind, Order, paired, require_counts
from lightning_megatron.pipeline.schedule_spec import Formula, Schedule, ScheduleSpec
from lightning_megatron.pipeline.schedules.overlapped_1f1b import make_overlapped
from lightning_megatron.pipeline.simulate import Costs


def one_f_one_b(*, pp: int, microbatches: int) -> Order:
    """The 1F1B order, rank r holding stage r: forwards to fill the pipeline, then one forward one backward, then the
    backwards that are left.

    Rank r saves at most min(pp - r, microbatches) activations; the bubble is (pp - 1)/(microbatches + pp - 1).
    Raises ValueError for fewer than one rank or microbatch.
    Source: Narayanan et al. 2021, Memory-Efficient Pipeline-Parallel DNN Training (PipeDream-Flush), section 2.2.
    """
    require_counts(pp=pp, microbatches=microbatches)
    return tuple(
        paired(
            [Action(Kind.FORWARD, rank, m) for m in range(microbatches)],
            [Action(Kind.BACKWARD, rank, m) for m in range(microbatches)],
            num_warmup=min(pp - rank - 1, microbatches),
        )
        for rank in range(pp)
    )


def _bubble(schedule: Schedule, costs: Costs) -> Formula:
    p, m = schedule.pp, schedule.microbatches
    return Formula(text="(p - 1)/(m + p - 1)", bubble=(p - 1) / (m + p - 1))


ONE_F_ONE_B = ScheduleSpec(
    name="1f1b",
    make=lambda schedule: one_f_one_b(pp=schedule.pp, microbatches=schedule.microbatches),
    make_overlapped=make_overlapped,
    max_chunks=1,
    bubble=_bubble,
    steady_after=lambda schedule: (2 * schedule.pp if schedule.is_overlapped else schedule.pp) + 2,
    ramps_once=True,
)
