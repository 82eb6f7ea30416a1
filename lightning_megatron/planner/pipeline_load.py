"""What a schedule makes of a stage: how long a step takes, and how many microbatches a rank keeps, in closed form.

Beside the simulator, which plays every action: for 64 ranks of 8 chunks and 512 microbatches these take no time at all.
With p ranks of v chunks, m microbatches, f and b the forward and backward of a microbatch through a rank:

    kept        by chunk, while a rank keeps the most; as in the docstrings of the orders
    1f1b        sum over ranks of (f + b)          + (m - 1) max over ranks of (f + b)
    interleaved (sum over ranks of (f + b) - max) / v  + m max

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
            return (min(pp - rank, m),)
        case "gpipe":
            return (m,) * chunks
        case "zb_h1":
            return (min(pp, m),)
        case "zb_v":
            return (min(pp, m),) * 2
    group = min(schedule.group_size or pp, m)
    num_ahead = min(2 * (pp - rank - 1) + (chunks - 1) * group + 1, chunks * -(-m // group) * group)
    turns = turns_of(chunks, m, group)[:num_ahead]
    # What the last group lacks is no turn.
    return tuple(sum(at == chunk and microbatch < m for at, microbatch in turns) for chunk in range(chunks))


def step_seconds(schedule: Schedule, forwards: Sequence[float], backwards: Sequence[float]) -> float:
    """From the first forward to the last backward, for the seconds of a microbatch through all chunks of each rank."""
    totals = [forward + backward for forward, backward in zip(forwards, backwards, strict=True)]
    slowest = max(totals)
    busy = schedule.microbatches * slowest
    if schedule.pp == 1:
        return busy
    forward, backward = sum(forwards) / len(forwards), sum(backwards) / len(backwards)
    if bubble_formula(schedule, Costs(forward=1.0, backward=2.0)) is not None and schedule.name in (
        "1f1b",
        "interleaved",
    ):
        return busy + (sum(totals) - slowest) / schedule.chunks
    share = _bubble(schedule, round(backward / forward, 1))
    return busy / (1 - share)


@lru_cache(maxsize=256)
def _bubble(schedule: Schedule, backward: float) -> float:
    """The share of a step that stands idle, played; half of a backward is that of the weights."""
    half = backward / 2
    return timeline_of(
        schedule, Costs(forward=1.0, backward=backward, backward_input=half, backward_weight=half)
    ).bubble
