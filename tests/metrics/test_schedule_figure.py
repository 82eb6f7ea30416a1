"""A schedule's panel and a step's rows have each activity once, at its time, in a colour of its own."""

from itertools import combinations

import pytest

from lightning_megatron.metrics.schedule_figure import schedule_panel, step_row
from lightning_megatron.metrics.step_timeline import DATA, OPTIMIZER, REDUCE, ActivitySpan
from lightning_megatron.pipeline.bubble import timeline_of
from lightning_megatron.pipeline.registry import ScheduleName
from lightning_megatron.pipeline.schedule import Action, Kind
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.simulate import Costs

CASES: list[tuple[ScheduleName, int, Costs]] = [
    ("gpipe", 1, Costs()),
    ("1f1b", 1, Costs(message=0.3)),
    ("interleaved", 3, Costs(backward=2.5)),
    ("zb_h1", 1, Costs(backward_weight=0.7)),
    ("zb_v", 2, Costs()),
]
SPANS = (
    ActivitySpan(DATA, 0, 3.0, 3.2),
    ActivitySpan(Action(Kind.RECV_FORWARD, 0, 0), 0, 3.2, 3.6),
    ActivitySpan(Action(Kind.FORWARD, 0, 0), 0, 3.6, 4.6),
    ActivitySpan(Action(Kind.FORWARD, 2, 1), 0, 4.6, 5.6),
    ActivitySpan(Action(Kind.BACKWARD, 2, 1), 0, 5.6, 7.6),
    ActivitySpan(Action(Kind.REDUCE_GRADS, 2, -1), 0, 7.0, 7.6),
    ActivitySpan(OPTIMIZER, 0, 7.6, 8.0),
)


@pytest.mark.parametrize(("name", "chunks", "costs"), CASES, ids=[name for name, _, _ in CASES])
def test_every_compute_is_a_bar_and_what_is_left_is_the_bubble(name: ScheduleName, chunks: int, costs: Costs) -> None:
    timeline = timeline_of(Schedule(name=name, pp=3, chunks=chunks, microbatches=7), costs)
    panel = schedule_panel(timeline, unit="time")
    assert [row.label for row in panel.rows] == ["rank 0", "rank 1", "rank 2"]
    colours: dict[tuple[str, int], set[str]] = {}
    for rank, (row, spans) in enumerate(zip(panel.rows, timeline.spans, strict=True)):
        assert len(row.bars) == 7 * chunks * (2 if name in ("gpipe", "1f1b", "interleaved") else 3)
        stages = sorted({span.action.stage for span in spans})
        for bar, span in zip(row.bars, spans, strict=True):
            assert (bar.start, bar.end, bar.label) == (span.start, span.end, str(span.action.microbatch))
            colours.setdefault((span.action.kind.value, stages.index(span.action.stage)), set()).add(bar.colour)
        busy = sum(bar.end - bar.start for bar in row.bars) / timeline.makespan
        assert busy == pytest.approx(1 - timeline.bubbles[rank])
    # A kind and a chunk have one colour, and no two share it.
    assert all(len(found) == 1 for found in colours.values())
    assert all(a != b for a, b in combinations(colours.values(), 2))
    entries = {bar.entry for row in panel.rows for bar in row.bars}
    halves = {"backward, input", "backward, weights"} if name.startswith("zb") else {"backward"}
    assert entries == {"forward"} | halves and panel.idle == "idle"


def test_a_compute_that_takes_no_time_is_not_drawn() -> None:
    schedule = Schedule(name="zb_h1", pp=3, chunks=1, microbatches=7)
    panel = schedule_panel(timeline_of(schedule, Costs(backward_weight=0)), unit="time")
    assert [len(row.bars) for row in panel.rows] == [14, 14, 14]


def test_a_step_is_in_milliseconds_with_computes_above_what_ran_below_them() -> None:
    row = step_row("rank 0", SPANS, (0, 2), begin=3.0)
    times = {(round(bar.start), round(bar.end)) for bar in row.bars}
    assert times == {(round((span.start - 3) * 1e3), round((span.end - 3) * 1e3)) for span in SPANS}
    names = ["waiting for a message", DATA, "backward", "forward", "forward", REDUCE, OPTIMIZER]
    assert [bar.entry for bar in row.bars] == names
    assert [bar.label for bar in row.bars] == ["", "", "1", "0", "1", "", ""]
    # Both chunks' forwards, and everything else, are distinguished.
    assert len({bar.colour for bar in row.bars}) == len(SPANS)
