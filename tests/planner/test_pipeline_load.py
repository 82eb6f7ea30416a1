"""The closed forms of a schedule's load are what the simulator plays."""

from dataclasses import replace

import pytest

from lightning_megatron.pipeline.bubble import timeline_of
from lightning_megatron.pipeline.registry import SCHEDULES as SCHEDULES_BY_NAME
from lightning_megatron.pipeline.registry import order_of, overlapped_forwards, schedule_faults
from lightning_megatron.pipeline.schedule import Kind
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.simulate import Costs
from lightning_megatron.planner.pipeline_load import saved_by_chunk, step_seconds

SCHEDULES = [
    Schedule(name=name, pp=pp, chunks=chunks, microbatches=m)
    for name in SCHEDULES_BY_NAME
    for pp in (1, 2, 4)
    for chunks in (1, 2, 3)
    for m in (1, 3, 4, 8, 13)
    if not schedule_faults(Schedule(name=name, pp=pp, chunks=chunks, microbatches=m))
] + [Schedule(name="interleaved", pp=4, chunks=3, microbatches=10, group_size=5)]
JOINT = [replace(schedule, is_overlapped=True) for schedule in SCHEDULES if SCHEDULES_BY_NAME[schedule.name].ramps_once]


def ids(schedules: list[Schedule]) -> list[str]:
    return [f"{s.name}{'-joint' * s.is_overlapped}-{s.pp}-{s.chunks}-{s.microbatches}" for s in schedules]


@pytest.mark.parametrize("schedule", SCHEDULES + JOINT, ids=ids(SCHEDULES + JOINT))
def test_a_rank_keeps_as_many_microbatches_as_the_simulator_counts(schedule: Schedule) -> None:
    timeline = timeline_of(schedule, Costs())
    for rank in range(schedule.pp):
        assert sum(saved_by_chunk(schedule, rank)) == timeline.peak_activations[rank]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=ids(SCHEDULES))
def test_a_step_of_equal_ranks_takes_as_long_as_the_simulator_plays(schedule: Schedule) -> None:
    costs = Costs(forward=1.0, backward=2.0, backward_input=1.0, backward_weight=1.0)
    makespan = timeline_of(schedule, costs).makespan
    assert step_seconds(schedule, [1.0] * schedule.pp, [2.0] * schedule.pp) == pytest.approx(makespan)


def played_in_pairs(schedule: Schedule, slow: float, hidden: float) -> float:
    """The makespan where ranks take 1 and 2, the last `slow` times that, and pairs `hidden` less."""
    order, joint, chunks = order_of(schedule), overlapped_forwards(schedule), schedule.chunks
    ends: dict[tuple[Kind, int, int], float] = {}
    at, clocks = [0] * schedule.pp, [0.0] * schedule.pp
    while any(index < len(own) for index, own in zip(at, order, strict=True)):
        for rank, own in enumerate(order):
            if at[rank] == len(own):
                continue
            pair = own[at[rank] : at[rank] + 1 + (own[at[rank]] in joint)]
            read = [(a.kind, a.stage + (-1 if a.kind is Kind.FORWARD else 1), a.microbatch) for a in pair]
            read = [key for key in read if 0 <= key[1] < schedule.pp * chunks]
            if any(key not in ends for key in read):
                continue
            seconds = sum(1.0 if a.kind is Kind.FORWARD else 2.0 for a in pair) - hidden * (len(pair) == 2)
            seconds *= (slow if rank == schedule.pp - 1 else 1.0) / chunks
            clocks[rank] = max([clocks[rank], *(ends[key] for key in read)]) + seconds
            ends |= {(a.kind, a.stage, a.microbatch): clocks[rank] for a in pair}
            at[rank] += len(pair)
    return max(clocks)


FULL = [s for s in JOINT if s.chunks == 1 or s.microbatches % (s.group_size or s.pp) == 0]


@pytest.mark.parametrize("schedule", FULL, ids=ids(FULL))
@pytest.mark.parametrize(("slow", "hidden"), [(1.0, 0.0), (1.0, 0.9), (1.5, 0.9)])
def test_a_step_of_pairs_takes_as_long_as_they_take_side_by_side(
    schedule: Schedule, slow: float, hidden: float
) -> None:
    rates = [1.0] * (schedule.pp - 1) + [slow]
    spared = [hidden * rate for rate in rates]
    found = step_seconds(schedule, rates, [2 * rate for rate in rates], spared)
    assert found == pytest.approx(played_in_pairs(schedule, slow, hidden))


def test_the_slowest_rank_sets_the_pace_and_the_others_fill_and_drain() -> None:
    schedule = Schedule(name="1f1b", pp=4, chunks=1, microbatches=8)
    assert step_seconds(schedule, [1.0, 1.0, 1.0, 2.0], [2.0, 2.0, 2.0, 4.0]) == pytest.approx(8 * 6 + 3 * 3)


def test_a_trillion_parameters_in_chunks_need_no_simulation() -> None:
    schedule = Schedule(name="interleaved", pp=64, chunks=8, microbatches=512)
    assert saved_by_chunk(schedule, 0) == (127, *[64] * 7)
    assert step_seconds(schedule, [1.0] * 64, [2.0] * 64) == pytest.approx(3 * 512 + 63 * 3 / 8)
