"""All rows of the benchmark write the same texts, and one that writes others is not shown."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.generation import ROWS, SIZES, YARDSTICK, report, run_rank, sample_of, save_model
from tests.harness.ranks import run_on_ranks

pytest.importorskip("transformers")


def sample(row: str, folder: Path) -> dict[str, Any]:
    return sample_of(run_on_ranks(ROWS[row], run_rank, row, SIZES["smoke"], folder, init=False))


def test_every_row_writes_what_transformers_writes(tmp_path: Path) -> None:
    save_model(SIZES["smoke"], tmp_path)
    samples = {row: [sample(row, tmp_path)] for row in ROWS}
    table, is_right = report(samples, SIZES["smoke"])
    assert is_right and "wrong" not in table and table.count("\n") == 1 + len(ROWS)
    texts = samples[YARDSTICK][0]["texts"]
    assert [len(text) for text in texts] == [5 + 6] * 2 and texts[0][5:] != texts[1][5:]


def test_other_texts_are_reported_and_not_timed() -> None:
    right = {"cpu_seconds": 1.0, "wall_seconds": 2.0, "texts": [[1, 2]]}
    samples = {YARDSTICK: [right], "ours": [right, right | {"texts": [[1, 3]]}]}
    table, is_right = report(samples, {"rows": 1, "new": 10})
    assert not is_right and table.endswith("| ours | 1 | wrong: other texts than transformers | | |")
    assert "| transformers | 1 | 10 | 5 | 1.00 |" in table
