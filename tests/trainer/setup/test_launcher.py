"""Real launches: by Lightning's own subprocesses and by torchrun, with the same outcome as one device.

Both claims are of one launch: fresh processes import everything anew, which takes most of its time.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_megatron.checkpoint import is_checkpoint
from lightning_megatron.trainer.setup.launcher import CheckingLauncher
from tests.harness.ranks import ROOT, free_port, run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer.layouts import PLAIN, make_trainer
from tests.trainer.modules import Data, Small

SCRIPT = "tests/trainer/setup/user_script.py"


def plain_loss() -> float:
    trainer = make_trainer(PLAIN, max_epochs=1)
    trainer.fit(Small(), Data())
    return float(trainer.callback_metrics["val_loss"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", every_nth([(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")], 2)
)
def test_a_script_under_a_launcher_trains_as_one_device_and_saves_and_leaves_at_a_signal(
    launcher: tuple[str, ...], tmp_path: Path
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MASTER_PORT": str(free_port())}
    command = [sys.executable, *launcher, SCRIPT, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 600
        while not (tmp_path / "rank 0 trains").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, output = process.communicate(timeout=60)
    assert all((tmp_path / f"{rank}.json").exists() for rank in range(2)), output
    shown: list[dict[str, Any]] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [found["world"] for found in shown] == [2, 2], output
    [loss] = run_on_ranks(1, plain_loss, init=False)
    assert [found["val_loss"] for found in shown] == pytest.approx([loss, loss], abs=1e-11), output
    # torchrun itself ends as one that was asked to.
    assert process.returncode == 0 or launcher, output
    assert is_checkpoint(tmp_path / "last.ckpt"), output
    assert not (tmp_path / "came to its end").exists()


def test_the_only_process_runs_as_it_is_in_notebooks_too() -> None:
    alone, one_of_two = (CheckingLauncher(LightningEnvironment(), num, 1, lambda _, run: run) for num in (1, 2))
    assert alone.is_interactive_compatible
    assert not one_of_two.is_interactive_compatible
    before = dict(os.environ), threading.enumerate()
    assert alone.launch(lambda: (dict(os.environ), threading.enumerate())) == before
