"""What a schedule makes of a stage: how long a step takes, and how many microbatches a rank keeps, in closed form.

Beside the simulator, which plays every action: for 64 ranks of 8 chunks and 512 microbatches these take no time at all.
With p ranks of v chunks, m microbatches, f and b the forward and backward of a microbatch through a rank:

    kept        by chunk, while a rank keeps the most; as in the docstrings of the orders
    1f1b        sum over ranks of (f + b)          + (m - 1) max over ranks of (f + b)
    interleaved (sum over ranks of (f + b) - max) / v  + m max
    joint       the same less what the pairs of the last rank hide; the slowest is who takes longest for a pair

which for equal ranks is the bubble of `pipeline.bubble`. Where that module has no formula, the simulator is asked.
"""

from collections.abc import Sequence
from functools import lru_cache

from lightning_megatron.pipeline.bubble import bubble_formula, timeline_of
from lightning_megatron.pipeline.choice import Schedule
from lightning_megatron.pipeline.interleaved import turns_of
from lightning_megatron.pipeline.simulate import Costs


@lru_cache(maxsize=65536)
def kept_by_chunk(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Microbatches of each chunk whose activations a rank keeps, when it keeps the most."""
    pp, chunks, m = schedule.pp, schedule.chunks, schedule.microbatches
    match schedule.name:
        case "1f1b":
            return (min(num_ahead(schedule, rank) + schedule.is_overlapped, m),)
        case "gpipe":
            return (m,) * chunks
        case "zb_h1":
            return (min(pp, m),)
        case "zb_v":
            return (min(pp, m),) * 2
    group = min(schedule.group_size or pp, m)
    turns = turns_of(chunks, m, group)[: num_ahead(schedule, rank) + schedule.is_overlapped]
    # What the last group lacks is no turn.
    return tuple(sum(at == chunk and microbatch < m for at, microbatch in turns) for chunk in range(chunks))


def num_ahead(schedule: Schedule, rank: int) -> int:
    """Forwards of a rank before its first backward, or, under a joint schedule, before its first pair."""
    pp, chunks, m = schedule.pp, schedule.chunks, schedule.microbatches
    if chunks == 1:
        return min(2 * (pp - rank) - 1 if schedule.is_overlapped else pp - rank, m)
    group = min(schedule.group_size or pp, m)
    return min(2 * (pp - rank - 1) + (chunks - 1) * group + 1, chunks * -(-m // group) * group)


def splits_backward(schedule: Schedule) -> bool:
    """Whether backwards are cut in two, and the halves that make weights' gradients come later."""
    return schedule.name in ("zb_h1", "zb_v")


def has_pairs(schedule: Schedule, rank: int) -> bool:
    """Whether a rank runs a forward beside a backward."""
    return schedule.is_overlapped and num_ahead(schedule, rank) < schedule.chunks * schedule.microbatches


def num_pairs(schedule: Schedule) -> float:
    """Pairs of a forward and a backward that the last rank runs, each through all chunks."""
    if not schedule.is_overlapped:
        return 0.0
    return max(schedule.microbatches - num_ahead(schedule, schedule.pp - 1) / schedule.chunks, 0.0)


def step_seconds(
    schedule: Schedule, forwards: Sequence[float], backwards: Sequence[float], hidden: Sequence[float] = ()
) -> float:
    """From the first forward to the last backward, for the seconds of a microbatch through all chunks of each rank.

    `hidden` is what a forward and a backward of each rank take less side by side than one after the other.
    """
    totals = [forward + backward for forward, backward in zip(forwards, backwards, strict=True)]
    spared, slowest = min(zip(hidden or [0.0] * len(totals), totals, strict=True), key=lambda pair: pair[0] - pair[1])
    busy, spared = schedule.microbatches * slowest, num_pairs(schedule) * spared
    if schedule.pp == 1:
        return busy - spared
    forward, backward = sum(forwards) / len(forwards), sum(backwards) / len(backwards)
    if bubble_formula(schedule, Costs(forward=1.0, backward=2.0)) is not None and schedule.name in (
        "1f1b",
        "interleaved",
    ):
        return busy + (sum(totals) - slowest) / schedule.chunks - spared
    share = _bubble(schedule, round(backward / forward, 1))
    return busy / (1 - share) - spared


@lru_cache(maxsize=256)
def _bubble(schedule: Schedule, backward: float) -> float:
    """The share of a step that stands idle, played; half of a backward is that of the weights."""
    half = backward / 2
    return timeline_of(
        schedule, Costs(forward=1.0, backward=backward, backward_input=half, backward_weight=half)
    ).bubble
