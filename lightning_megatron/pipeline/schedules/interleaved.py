"""Interleaved 1F1B: each rank holds several chunks of the model, so that the pipeline fills in smaller steps.

Stage s is chunk s // pp of rank s % pp. Microbatches go through the chunks of a
rank in groups: those of the first group through chunk 0, then through chunk 1 and so on, then those of the next group.

    pp 2, chunks 2, group 2, rank 0    0F0 0F1 2F0 2F1   0F2 2B0   0F3 2B1   2F2 0B0   2F3 0B1   2B2 2B3 0B2 0B3
"""

from __future__ import annotations

from lightning_megatron.pipeline.schedule import Action, Kind, Order, paired, require_counts
from lightning_megatron.pipeline.schedule_spec import Formula, Schedule, ScheduleSpec
from lightning_megatron.pipeline.schedules.one_f_one_b import one_f_one_b
from lightning_megatron.pipeline.schedules.overlapped_1f1b import make_overlapped, turns_of
from lightning_megatron.pipeline.simulate import Costs


def interleaved_one_f_one_b(*, pp: int, chunks: int, microbatches: int, group_size: int) -> Order:
    """The interleaved 1F1B order with groups of that many microbatches; with one chunk it is `one_f_one_b`.

    It runs for any number of microbatches. Rank r saves at most 2*(pp - r - 1) + (chunks - 1)*group + 1 activations,
    group being the smaller of `group_size` and `microbatches`, and never more than chunks*microbatches. The bubble is
    (pp - 1)/(chunks*microbatches + pp - 1) if the last group, which is what others leave, is full, or has pp or more
    microbatches and a backward takes no less than a forward; each one less costs up to chunks - 1 forwards and
    backwards more.
    Raises ValueError for fewer than one rank, chunk or microbatch, and for groups smaller than pp.
    Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters, 2.2.2.
    """
    require_counts(pp=pp, chunks=chunks, microbatches=microbatches)
    if group_size < pp:
        # The first rank would be through a group before the last rank has handed any of it back for the next chunk, and
        # would stand idle, or, its forwards and backwards being paired, wait for ever.
        raise ValueError(f"group_size ({group_size}) must be at least pp ({pp}); use {pp} or more")
    if chunks == 1:
        return one_f_one_b(pp=pp, microbatches=microbatches)
    # A group larger than the step makes the same order, over turns without a microbatch.
    group_size = min(group_size, microbatches)
    return tuple(_interleaved_of(rank, pp, chunks, microbatches, group_size) for rank in range(pp))


def _interleaved_of(rank: int, pp: int, chunks: int, microbatches: int, group_size: int) -> tuple[Action, ...]:
    """One rank's order.

    Note: it is made for full groups, and what the last group lacks is struck out. Pairing the forwards and backwards
    that are left with each other instead would shift backwards of the group before it ahead of forwards that they wait
    for: with a small last group the ranks would wait for each other for ever.
    """
    turns = turns_of(chunks, microbatches, group_size)
    actions = paired(
        [Action(Kind.FORWARD, chunk * pp + rank, microbatch) for chunk, microbatch in turns],
        [Action(Kind.BACKWARD, (chunks - 1 - chunk) * pp + rank, microbatch) for chunk, microbatch in turns],
        num_warmup=min(2 * (pp - rank - 1) + (chunks - 1) * group_size, len(turns)),
    )
    return tuple(action for action in actions if action.microbatch < microbatches)


def _bubble(schedule: Schedule, costs: Costs) -> Formula | None:
    p, v, m = schedule.pp, schedule.chunks, schedule.microbatches
    if not _is_full(schedule, costs):
        return None
    return Formula(text="(p - 1)/(v m + p - 1)", bubble=(p - 1) / (v * m + p - 1))


def _is_full(schedule: Schedule, costs: Costs) -> bool:
    """Whether the groups leave no gaps but at both ends of the step."""
    group_size = min(schedule.group, schedule.microbatches)
    last_group = schedule.microbatches % group_size
    if last_group == 0:
        return group_size >= schedule.pp
    # Backwards shorter than forwards do not fill the gap that the missing microbatches leave.
    return last_group >= schedule.pp and costs.backward >= costs.forward


INTERLEAVED = ScheduleSpec(
    name="interleaved",
    make=lambda schedule: interleaved_one_f_one_b(
        pp=schedule.pp, chunks=schedule.chunks, microbatches=schedule.microbatches, group_size=schedule.group
    ),
    make_overlapped=make_overlapped,
    min_chunks=2,
    min_pp=2,
    has_groups=True,
    bubble=_bubble,
    # The last group stays as full as it is.
    steady_after=lambda schedule: 3 * schedule.group + schedule.microbatches % schedule.group,
    ramps_once=True,
)
