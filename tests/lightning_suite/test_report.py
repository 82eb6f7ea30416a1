"""What the page of Lightning's tests counts: a failure on either rank, and a reason only where its pattern is found."""

import json
from pathlib import Path
from typing import Any

from tests.lightning_suite.__main__ import Run
from tests.lightning_suite.report import Outcome, page

TEST = "tests_pytorch/trainer/test_flags.py::"


def result(name: str, outcome: str, message: str = "") -> dict[str, Any]:
    return {"test": TEST + name, "outcome": outcome, "message": message, "chosen": ["single_device"]}


def by_name(*results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {found["test"]: found for found in results}


def test_a_test_in_lockstep_is_green_on_both_ranks_or_not_at_all(tmp_path: Path) -> None:
    ranks = (
        [result("both", "passed"), result("second", "passed"), {**result("left", "started"), "message": ""}],
        [result("both", "passed"), result("second", "failed", "one"), result("left", "passed")],
    )
    for rank, results in enumerate(ranks):
        lines = [json.dumps(found) for found in results]
        (tmp_path / f"lockstep_trainer_{rank}.jsonl").write_text("\n".join(lines))
    results = Run(tmp_path, tmp_path, limit=1).results("lockstep", "trainer")
    assert {name.removeprefix(TEST): found["outcome"] for name, found in results.items()} == {
        "both": "passed",
        "second": "failed",
    }


def test_a_failure_is_of_a_reason_or_counted_as_ours() -> None:
    results = by_name(
        result("green", "passed"),
        result("mocked", "failed", "AssertionError: assert 0 == 6 + where 0 = <MagicMock name='backward'>.call_count"),
        result("wrong", "failed", "AssertionError: assert 1.0 == 2.0"),
        result("ddp_too", "failed", "AssertionError: assert 2 == 1"),
    )
    control = by_name(
        result("ddp_too", "failed", "AssertionError: assert 2 == 1"),
        # It fails too, but in another way.
        result("wrong", "failed", "AssertionError: assert 0.5 == 2.0"),
    )
    alone = Outcome(mode="world1", names=[*results, TEST + "left"], results=results, control={})
    in_step = Outcome(mode="lockstep", names=[*results], results=results, control=control)
    assert (alone.num_green, alone.num_without_reason, in_step.num_without_reason) == (1, 2, 1)
    text = page(results, [alone, in_step])
    assert "| world1 | 5 | 1 | 1 | 1 | 2 | 50.0% |" in text
    assert "| lockstep | 4 | 0 | 1 | 2 | 1 | 75.0% |" in text
    assert "trainer/test_flags.py::wrong: AssertionError: assert 1.0 == 2.0" in text
