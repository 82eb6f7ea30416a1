"""The benchmark of several GPUs runs on two CPU ranks: every row trains what the first one does, or says why not."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import multi_gpu
from benchmarks.multi_gpu import FIRST, MICROBATCHES, TOLERANCE, combined, line, require_same, rows
from lightning_megatron import MegatronStrategy


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("has_experts", [False, True])
def test_every_row_is_a_layout_of_all_ranks_and_has_the_step_s_microbatches(ranks: int, has_experts: bool) -> None:
    found = rows(ranks, has_experts)
    assert next(iter(found)) == FIRST and len(found) == 15 + 2 * (ranks > 2) + has_experts * (2 + (ranks > 2))
    for row, options in found.items():
        # Its dataclasses check themselves.
        strategy = MegatronStrategy(**options)
        cut = 1
        for axis in ("tensor_model", "pipeline_model", "context"):
            cut *= options.get(f"{axis}_parallel_size", 1)
        assert ranks % cut == 0, row
        assert strategy.num_microbatches * (ranks // cut) == MICROBATCHES, row


@pytest.mark.slow
def test_the_command_writes_table_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = ("ep, dp",)
    command = ["--device", "cpu", "--ranks", "2", "--size", "smoke experts", "--warmup", "1", "--steps", "2"]
    written = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["multi_gpu.py", *command, "--rows", *wanted, "--json", str(written)])
    with pytest.raises(SystemExit) as ended:
        multi_gpu.main()
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.err
    found = json.loads(written.read_text())["rows"]
    assert set(found) == {FIRST, *wanted} and not any(one["fault"] for one in found.values())
    for row in found:
        assert f"\n| {row} | " in printed.out
    assert len(found[FIRST]["losses"]) == 3 and found[FIRST]["losses"][0] != found[FIRST]["losses"][-1]


def made(loss: float, seconds: float = 1.0) -> dict[str, Any]:
    return {"seconds": [9.0, seconds, 0.0], "losses": [4.0, loss], "peak_bytes": 2**31, "fault": "", "is_broken": False}


def test_the_slowest_rank_and_the_fullest_count() -> None:
    found = combined([made(3.0, 1.0) | {"peak_bytes": 1}, made(5.0, 2.0)])
    assert found["seconds"] == [9.0, 2.0, 0.0] and found["losses"] == [4.0, 4.0] and found["peak_bytes"] == 2**31


@pytest.mark.parametrize("loss", [3.0 * (1 + 2 * TOLERANCE), float("nan")])
def test_a_row_whose_loss_strays_shows_no_time(loss: float) -> None:
    found = require_same(made(loss), made(3.0))
    asked = argparse.Namespace(size="smoke", sequence=32, layers=0, ranks=2)
    assert found["is_broken"] and "wrong: the loss of step 2" in line("tp", found, made(3.0), asked)
    assert "| 1.000 | 3.0000 |" in line("tp", require_same(made(3.0), made(3.0)), made(3.0), asked)
