"""Time of a step under a pipeline schedule, and the microbatches that a rank saves for backward.

The order of a schedule is walked for as many microbatches as differ (`ScheduleSpec.steady_after`). With p ranks of v
chunks, m microbatches, f and b the forward and backward of a microbatch through a rank, a step of a schedule that ramps
up once takes

    (sum over ranks of (f + b) - max) / v  + m max

less the time that overlap hides on the last rank; the slowest rank is then the one with the longest overlapped pair.
For all other schedules the simulator gives the bubble's share of the step.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from lightning_megatron.pipeline.bubble import timeline_of
from lightning_megatron.pipeline.registry import bubble_formula, order_of, overlapped_forwards, spec_of
from lightning_megatron.pipeline.schedule import Action, Kind, Order
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.simulate import Costs


def saved_by_chunk(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Number of microbatches of each chunk that a rank saves for backward, when it first saves the most."""
    return _saved_by_chunk(_steady(schedule), rank)


@lru_cache(maxsize=65536)
def _saved_by_chunk(steady: Schedule, rank: int) -> tuple[int, ...]:
    actions = _steady_order(steady)[rank]
    chunks = {stage: chunk for chunk, stage in enumerate(sorted({action.stage for action in actions}))}
    saved, most = [0] * len(chunks), (0,) * len(chunks)
    for action in actions:
        if action.kind is Kind.FORWARD:
            saved[chunks[action.stage]] += 1
            if sum(saved) > sum(most):
                most = tuple(saved)
        elif action.kind is not Kind.BACKWARD_INPUT:
            saved[chunks[action.stage]] -= 1
    return most


def num_pairs(schedule: Schedule) -> float:
    """Number of overlapped forwards and backwards on the last rank, each through all chunks."""
    if not schedule.is_overlapped:
        return 0.0
    some = _steady(schedule)
    more = schedule.microbatches - some.microbatches
    return _num_pairs_of_rank(some, schedule.pp - 1) / schedule.chunks + more


def _steady(schedule: Schedule) -> Schedule:
    """The schedule with as many microbatches as differ."""
    return replace(schedule, microbatches=min(schedule.microbatches, spec_of(schedule.name).steady_after(schedule)))


@lru_cache(maxsize=8)
def _steady_order(schedule: Schedule) -> Order:
    return order_of(schedule)


@lru_cache(maxsize=8)
def _steady_pairs(schedule: Schedule) -> frozenset[Action]:
    return overlapped_forwards(schedule)


def _num_pairs_of_rank(schedule: Schedule, rank: int) -> int:
    pairs = _steady_pairs(schedule)
    return sum(action in pairs for action in _steady_order(schedule)[rank])


def step_seconds(
    schedule: Schedule, forwards: Sequence[float], backwards: Sequence[float], hidden: Sequence[float] = ()
) -> float:
    """Seconds from the first forward to the last backward, from those of a microbatch through all chunks of each rank.

    Overlap hides `hidden` seconds of a forward and a backward on each rank.
    """
    totals = [forward + backward for forward, backward in zip(forwards, backwards, strict=True)]
    pairs = zip(hidden or [0.0] * len(totals), totals, strict=True)
    gained, slowest = min(pairs, key=lambda pair: pair[0] - pair[1])
    busy, gained = schedule.microbatches * slowest, num_pairs(schedule) * gained
    if schedule.pp == 1:
        return busy - gained
    forward, backward = sum(forwards) / len(forwards), sum(backwards) / len(backwards)
    has_formula = bubble_formula(schedule, Costs(forward=1.0, backward=2.0)) is not None
    if has_formula and spec_of(schedule.name).ramps_once:
        return busy + (sum(totals) - slowest) / schedule.chunks - gained
    share = _bubble(schedule, round(backward / forward, 1))
    return busy / (1 - share) - gained


@lru_cache(maxsize=256)
def _bubble(schedule: Schedule, backward: float) -> float:
    """The simulated bubble as a share of the step; wgrad is half of a backward."""
    half = backward / 2
    return timeline_of(
        schedule, Costs(forward=1.0, backward=backward, backward_input=half, backward_weight=half)
    ).bubble
