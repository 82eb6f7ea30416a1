"""1F1B in which a forward and a backward of different microbatches overlap: each computes while messages of the other
are in flight within its layers (tokens to experts and back).

Both 1F1B and interleaved 1F1B can run so. A pair starts when both have what they read, so a rank is one
forward further ahead than under 1F1B, and two further than its next rank: when the next rank runs the pair of forward i
and backward j, this one runs that of forward i + 1 and backward j - 1.

    pp 2, rank 0    0F0 0F1 0F2   (0F3 0B0) (0F4 0B1)   0B2 0B3 0B4
          rank 1    1F0           (1F1 1B0) (1F2 1B1) (1F3 1B2) (1F4 1B3)   1B4
"""

from __future__ import annotations

from lightning_megatron.pipeline.schedule import Action, Kind, Order, paired, require_counts
from lightning_megatron.pipeline.schedule_spec import Schedule


def overlapped_one_f_one_b(
    *, pp: int, chunks: int, microbatches: int, group_size: int
) -> tuple[Order, frozenset[Action]]:
    """The order, and the forwards in it that overlap with the backward right after them.

    Stage s is chunk s // pp of rank s % pp. Rank r saves at most 2*(pp - r - 1) + (chunks - 1)*group + 2 activations,
    group being the smaller of `group_size` and `microbatches`.
    Raises ValueError for fewer than one rank, chunk or microbatch, and, with several chunks, for groups smaller than
    pp.
    """
    require_counts(pp=pp, chunks=chunks, microbatches=microbatches)
    if chunks > 1 and group_size < pp:
        raise ValueError(f"group_size ({group_size}) must be at least pp ({pp}); use {pp} or more")
    group_size = min(group_size, microbatches) if chunks > 1 else microbatches
    turns = turns_of(chunks, microbatches, group_size)
    order, overlapped = [], set[Action]()
    for rank in range(pp):
        num_warmup = min(2 * (pp - rank - 1) + (chunks - 1) * group_size + 1, len(turns))
        forwards = [Action(Kind.FORWARD, chunk * pp + rank, m) for chunk, m in turns]
        backwards = [Action(Kind.BACKWARD, (chunks - 1 - chunk) * pp + rank, m) for chunk, m in turns]
        pairs = zip(forwards[num_warmup:], backwards, strict=False)
        # As without overlap the order is made for full groups, and what the last group lacks is struck out.
        overlapped |= {f for f, b in pairs if max(f.microbatch, b.microbatch) < microbatches}
        actions = paired(forwards, backwards, num_warmup)
        order.append(tuple(action for action in actions if action.microbatch < microbatches))
    return tuple(order), frozenset(overlapped)


def make_overlapped(schedule: Schedule) -> tuple[Order, frozenset[Action]]:
    """`overlapped_one_f_one_b` of a schedule's sizes."""
    return overlapped_one_f_one_b(
        pp=schedule.pp, chunks=schedule.chunks, microbatches=schedule.microbatches, group_size=schedule.group
    )


def turns_of(chunks: int, microbatches: int, group_size: int) -> list[tuple[int, int]]:
    """The (chunk, microbatch) pairs in the order of a rank's forwards, the last group filled up."""
    num_groups = -(-microbatches // group_size)
    return [
        (chunk, group * group_size + index)
        for group in range(num_groups)
        for chunk in range(chunks)
        for index in range(group_size)
    ]
