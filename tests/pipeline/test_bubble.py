"""Formulas of the bubble against the plans played; schedules side by side."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.pipeline.bubble import timeline_of
from lightning_megatron.pipeline.lower import lower
from lightning_megatron.pipeline.registry import SCHEDULES, ScheduleName, bubble_formula, order_of, schedule_faults
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.simulate import Costs, check, play

NAMES = tuple(SCHEDULES)
COUNTS = st.integers(1, 6)


@given(
    st.builds(Schedule, name=st.sampled_from(NAMES), pp=COUNTS, chunks=COUNTS, microbatches=st.integers(1, 20)),
    st.integers(0, 12),
    st.integers(1, 3),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.0, 0.5]),
)
def test_where_there_is_a_formula_it_is_what_is_played(
    schedule: Schedule, group: int, forward: int, backward: int, message: float
) -> None:
    pp = schedule.pp
    group_size = pp + group if group and schedule.name == "interleaved" else 0
    chunks = SCHEDULES[schedule.name].max_chunks or schedule.chunks
    schedule = Schedule(
        name=schedule.name, pp=pp, chunks=chunks, microbatches=schedule.microbatches, group_size=group_size
    )
    if schedule_faults(schedule):
        return
    costs = Costs(forward=forward, backward=backward, message=message)
    if formula := bubble_formula(schedule, costs):
        assert timeline_of(schedule, costs).bubble == pytest.approx(formula.bubble, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "chunks", "bubble"),
    [
        ("gpipe", 1, 3 / 19),
        ("gpipe", 2, 3 / 35),
        ("1f1b", 1, 3 / 19),
        ("interleaved", 2, 3 / 35),
        ("interleaved", 4, 3 / 67),
        ("zb_h1", 1, 3 / 51),
        ("zb_v", 2, 3 / 99),
        ("dualpipe_v", 2, 3 / 99),
    ],
)
def test_every_schedule_has_a_formula_where_messages_take_no_time(
    name: ScheduleName, chunks: int, bubble: float
) -> None:
    schedule = Schedule(name=name, pp=4, chunks=chunks, microbatches=16)
    formula = bubble_formula(schedule, Costs())
    assert formula is not None and formula.bubble == pytest.approx(bubble)
    written = re.sub(r"(\w) m", r"\1*m", formula.text)
    assert eval(written, {"p": 4, "v": chunks, "m": 16}) == pytest.approx(bubble)
    assert bubble_formula(schedule, Costs(message=0.1)) is None


@pytest.mark.parametrize(
    ("schedule", "costs"),
    [
        (Schedule(name="gpipe", pp=4, chunks=2, microbatches=3), Costs()),
        (Schedule(name="interleaved", pp=4, chunks=2, microbatches=6), Costs()),
        (Schedule(name="interleaved", pp=4, chunks=2, microbatches=3), Costs()),
        (Schedule(name="interleaved", pp=4, chunks=2, microbatches=10, group_size=6), Costs(forward=2, backward=1)),
        (Schedule(name="zb_h1", pp=4, chunks=1, microbatches=3), Costs()),
        (Schedule(name="zb_h1", pp=4, chunks=1, microbatches=8), Costs(backward_weight=0.5)),
        (Schedule(name="zb_v", pp=4, chunks=2, microbatches=5), Costs()),
        (Schedule(name="dualpipe_v", pp=4, chunks=2, microbatches=8), Costs(backward=3)),
        (Schedule(name="1f1b", pp=4, chunks=1, microbatches=8), Costs(message=0.1)),
    ],
)
def test_where_there_is_none_it_would_be_wrong(schedule: Schedule, costs: Costs) -> None:
    assert bubble_formula(schedule, costs) is None
    alike = Schedule(name=schedule.name, pp=4, chunks=schedule.chunks, microbatches=4 * schedule.microbatches)
    denominators = {"zb_h1": 3, "zb_v": 6, "dualpipe_v": 6}.get(
        schedule.name, schedule.chunks
    ) * schedule.microbatches + 3
    assert bubble_formula(alike, Costs()) is not None
    assert abs(timeline_of(schedule, costs).bubble - 3 / denominators) > 1e-3


@pytest.mark.parametrize("microbatches", [1, 3, 4, 7, 13])
@pytest.mark.parametrize("costs", [Costs(), Costs(forward=1.1, backward_input=0.3), Costs(message=0.7)])
@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 3), ("1f1b", 1), ("interleaved", 3), ("zb_h1", 1), ("zb_v", 2)])
def test_the_timeline_is_that_of_the_full_plan_which_passes(
    name: ScheduleName, chunks: int, costs: Costs, microbatches: int
) -> None:
    schedule = Schedule(name=name, pp=4, chunks=chunks, microbatches=microbatches)
    plan = lower(order_of(schedule)).plan
    check(plan)
    of_chunk = replace(
        costs,
        forward=costs.forward / chunks,
        backward=costs.backward / chunks,
        backward_input=costs.backward_input / chunks,
        backward_weight=costs.backward_weight / chunks,
    )
    assert timeline_of(schedule, costs) == play(plan, of_chunk)


def test_a_step_of_more_chunks_computes_as_long() -> None:
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("gpipe", 3)):
        timeline = timeline_of(Schedule(name=name, pp=2, chunks=chunks, microbatches=4), Costs())
        for spans in timeline.spans:
            assert sum(span.end - span.start for span in spans) == pytest.approx(4 * 3)
