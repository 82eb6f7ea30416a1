"""Real launches: by Lightning's own subprocesses and by torchrun, with the same outcome as one device."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import ROOT, free_port, run_on_ranks
from tests.trainer.layouts import PLAIN, make_trainer
from tests.trainer.modules import Data, Small

SCRIPT = "tests/trainer/setup/user_script.py"


def start(*command: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MASTER_PORT": str(free_port())}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def plain_loss() -> float:
    trainer = make_trainer(PLAIN, max_epochs=1)
    trainer.fit(Small(), Data())
    return float(trainer.callback_metrics["val_loss"])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")])
def test_a_script_runs_under_a_launcher(launcher: tuple[str, ...], tmp_path: Path) -> None:
    ended = start(*launcher, SCRIPT, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    told: list[dict[str, Any]] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [found["world"] for found in told] == [2, 2]
    [loss] = run_on_ranks(1, plain_loss, init=False)
    assert [found["val_loss"] for found in told] == pytest.approx([loss, loss], abs=1e-11)
