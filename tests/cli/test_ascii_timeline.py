"""A timeline as text: every character is what the rank does at that time."""

import re

import pytest

from lightning_megatron.cli.ascii_timeline import ascii_timeline
from lightning_megatron.pipeline.bubble import timeline_of
from lightning_megatron.pipeline.registry import ScheduleName
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.simulate import Costs, Timeline


def played(name: ScheduleName, pp: int, chunks: int, microbatches: int, costs: Costs | None = None) -> Timeline:
    schedule = Schedule(name=name, pp=pp, chunks=chunks, microbatches=microbatches)
    return timeline_of(schedule, costs or Costs())


def rows_of(grid: str) -> list[str]:
    return [re.sub(r"^rank \d+ +", "", line) for line in grid.splitlines() if line.startswith("rank")]


@pytest.mark.parametrize(
    ("name", "chunks", "costs", "cell_time"),
    [
        ("1f1b", 1, Costs(), 1.0),
        ("1f1b", 1, Costs(forward=2, backward=3), 1.0),
        ("1f1b", 1, Costs(forward=0.1, backward=0.3, message=0.05), 0.05),
        ("interleaved", 2, Costs(), 0.5),
        ("interleaved", 3, Costs(), 1 / 3),
        ("zb_h1", 1, Costs(backward_weight=0.5), 0.5),
        ("zb_v", 2, Costs(backward_weight=0), 0.5),
    ],
)
def test_each_character_is_what_its_rank_computes_at_that_time(
    name: ScheduleName, chunks: int, costs: Costs, cell_time: float
) -> None:
    timeline = played(name, 3, chunks, 5, costs)
    num_cells = round(timeline.makespan / cell_time)
    rows = rows_of(ascii_timeline(timeline, message_time=costs.message, columns=num_cells + len("rank 0  ")))
    assert len(rows) == 3
    for row, spans in zip(rows, timeline.spans, strict=True):
        assert len(row) == num_cells
        first_stage = min(span.action.stage for span in spans)
        for place, cell in enumerate(row):
            time = (place + 0.5) * cell_time
            running = [span for span in spans if span.start < time < span.end]
            if not running:
                assert cell == "."
            elif running[0].start < time - cell_time:
                assert cell == "="
            else:
                assert cell.upper() == running[0].action.kind.value
                chunk = abs(running[0].action.stage - first_stage) // 3 if name == "interleaved" else 0
                assert name == "zb_v" or cell.islower() == (chunk % 2 == 1)


def test_where_there_is_room_a_compute_shows_its_microbatch() -> None:
    timeline = played("1f1b", 2, 1, 12)
    rows = rows_of(ascii_timeline(timeline, message_time=0, columns=200))
    assert rows[0].startswith("F00 F01 .   .   B00==== F02 B01====")
    assert rows[0].endswith("B11====")
    # Without the blanks between.
    rows = rows_of(ascii_timeline(timeline, message_time=0, columns=8 + 3 * 39))
    assert rows[0].startswith("F00F01.  .  B00===F02B01===")


@pytest.mark.parametrize("columns", [20, 50, 120])
def test_what_does_not_fit_is_cut_off_and_reported(columns: int) -> None:
    timeline = played("1f1b", 2, 1, 100)
    grid = ascii_timeline(timeline, message_time=0, columns=columns)
    rows = rows_of(grid)
    assert all(len(row) == columns - len("rank 0  ") for row in rows)
    assert f"{303 - len(rows[0])} of 303 cells cut off at time {len(rows[0])} of 303" in grid
    needed = re.search(r"--max-columns (\d+)", grid)
    assert needed is not None
    whole = ascii_timeline(timeline, message_time=0, columns=int(needed[1]))
    assert "cut off" not in whole and len(rows_of(whole)[0]) == 303
    assert "cut off" in ascii_timeline(timeline, message_time=0, columns=int(needed[1]) - 1)


@pytest.mark.parametrize("unit", [1e-12, 1e-5, 1e12])
def test_the_unit_of_the_costs_does_not_matter(unit: float) -> None:
    costs = Costs(forward=unit, backward=1.5 * unit, message=0.5 * unit)
    grid = ascii_timeline(played("1f1b", 2, 1, 4, costs), message_time=costs.message, columns=100)
    plain = Costs(forward=1, backward=1.5, message=0.5)
    assert rows_of(grid) == rows_of(ascii_timeline(played("1f1b", 2, 1, 4, plain), message_time=0.5, columns=100))


def test_a_compute_far_longer_than_the_line_costs_no_memory() -> None:
    grid = ascii_timeline(played("1f1b", 1, 1, 2, Costs(forward=1, backward=1e12)), message_time=0, columns=30)
    assert rows_of(grid) == ["FB" + "=" * 20]


def test_costs_without_a_common_measure_take_cells_of_the_shortest_compute() -> None:
    costs = Costs(forward=1, backward=2.137)
    grid = ascii_timeline(played("1f1b", 2, 1, 4, costs), message_time=0, columns=100)
    assert "= time 1;" in grid
    assert all(row.count("F") == 4 for row in rows_of(grid))
