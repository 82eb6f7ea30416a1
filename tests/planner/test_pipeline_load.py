"""The closed forms of a schedule's load are what the simulator plays."""

from typing import get_args

import pytest

from lightning_megatron.pipeline.bubble import timeline_of
from lightning_megatron.pipeline.choice import Schedule, ScheduleName
from lightning_megatron.pipeline.simulate import Costs
from lightning_megatron.planner.pipeline_load import kept_by_chunk, step_seconds

SCHEDULES = [
    Schedule(name=name, pp=pp, chunks=chunks, microbatches=m)
    for name in get_args(ScheduleName)
    for pp in (1, 2, 4)
    for chunks in {"gpipe": (1, 2), "interleaved": (2, 3), "zb_v": (2,)}.get(name, (1,))
    for m in (1, 3, 4, 8, 13)
    if not (name == "interleaved" and pp == 1)
] + [Schedule(name="interleaved", pp=4, chunks=3, microbatches=10, group_size=5)]
IDS = [f"{s.name}-{s.pp}-{s.chunks}-{s.microbatches}" for s in SCHEDULES]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=IDS)
def test_a_rank_keeps_as_many_microbatches_as_the_simulator_counts(schedule: Schedule) -> None:
    timeline = timeline_of(schedule, Costs())
    for rank in range(schedule.pp):
        kept, played = sum(kept_by_chunk(schedule, rank)), timeline.peak_activations[rank]
        # Of ZB-V it is what a rank keeps at most; with few microbatches some ranks keep less.
        assert kept == played or (schedule.name == "zb_v" and played < kept <= 2 * schedule.pp)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=IDS)
def test_a_step_of_equal_ranks_takes_as_long_as_the_simulator_plays(schedule: Schedule) -> None:
    costs = Costs(forward=1.0, backward=2.0, backward_input=1.0, backward_weight=1.0)
    makespan = timeline_of(schedule, costs).makespan
    assert step_seconds(schedule, [1.0] * schedule.pp, [2.0] * schedule.pp) == pytest.approx(makespan)


def test_the_slowest_rank_sets_the_pace_and_the_others_fill_and_drain() -> None:
    schedule = Schedule(name="1f1b", pp=4, chunks=1, microbatches=8)
    assert step_seconds(schedule, [1.0, 1.0, 1.0, 2.0], [2.0, 2.0, 2.0, 4.0]) == pytest.approx(8 * 6 + 3 * 3)


def test_a_trillion_parameters_in_chunks_need_no_simulation() -> None:
    schedule = Schedule(name="interleaved", pp=64, chunks=8, microbatches=512)
    assert kept_by_chunk(schedule, 0) == (127, *[64] * 7)
    assert step_seconds(schedule, [1.0] * 64, [2.0] * 64) == pytest.approx(3 * 512 + 63 * 3 / 8)
