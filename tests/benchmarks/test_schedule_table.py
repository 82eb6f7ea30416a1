"""The table of schedules has every schedule next to 1F1B, and the page shows it."""

from pathlib import Path

import pytest

from benchmarks.schedule_table import schedule_table
from lightning_megatron.pipeline.registry import SCHEDULES
from lightning_megatron.pipeline.simulate import Costs


def test_the_table_puts_every_schedule_next_to_1f1b() -> None:
    rows = schedule_table(4, 12)
    assert {row.schedule.name for row in rows} == set(SCHEDULES)
    assert rows[0].schedule.name == "1f1b" and rows[0].relative_time == 1
    assert rows[0].makespan == (12 + 3) * 3
    for row in rows:
        assert row.schedule.pp == 4 and row.schedule.microbatches == 12
        assert row.relative_time == row.makespan / rows[0].makespan
        # As much is computed under every schedule.
        assert row.makespan * (1 - row.bubble) == pytest.approx(36)
    peaks = {(row.schedule.name, row.schedule.chunks): row.peak_shares for row in rows}
    assert peaks["gpipe", 1] == 12 and peaks["1f1b", 1] == peaks["zb_h1", 1] == peaks["zb_v", 2] == 4
    assert peaks["interleaved", 2] == 11 / 2


def test_the_table_of_slower_backwards_is_another() -> None:
    slow = schedule_table(2, 4, Costs(backward=4, backward_input=3, message=0.5))
    assert all(a.makespan > b.makespan for a, b in zip(slow, schedule_table(2, 4), strict=True))


def test_the_page_shows_the_table() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/pipeline.md").read_text()
    found = [
        {(row.schedule.name, row.schedule.chunks): row for row in schedule_table(8, microbatches)}
        for microbatches in (8, 16, 32, 64)
    ]
    for (schedule, chunks), last in found[-1].items():
        name = f"`{schedule}`" + (f", v = {chunks}" if chunks > 1 else "")
        rows = [table[schedule, chunks] for table in found]
        fields = " | ".join(f"{row.bubble:.1%}, {row.relative_time:.3f}" for row in rows)
        assert f"\n| {name} | {fields} | {last.peak_shares:g} |\n" in page
