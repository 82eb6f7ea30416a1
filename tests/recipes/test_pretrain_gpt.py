"""The recipe as a user runs it: real processes from one command line."""

import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.ranks import ROOT, free_port
from tests.lightning_modules.corpus import write_corpus
from tests.recipes.launched import launched

TINY = """
trainer:
  accelerator: cpu
  devices: 2
  precision: 32-true
  max_steps: 4
  log_every_n_steps: 1
  limit_val_batches: 2
  val_check_interval: 4
  check_val_every_n_epoch: null
  num_sanity_val_steps: 0
  enable_model_summary: false
  strategy:
    class_path: lightning_megatron.MegatronStrategy
    init_args:
      tensor_model_parallel_size: 2
      sequence_parallel: true
      timeout_seconds: 60
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args:
      save_dir: logs
      name: tiny
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args:
        every_n_train_steps: 2
        save_top_k: -1
        dirpath: saved
        filename: "{step}"
model:
  config:
    num_layers: 2
    hidden_size: 32
    num_attention_heads: 4
    vocab_size: 300
    max_sequence_length: 16
  optimizer:
    lr: 1.0e-2
    total_steps: 4
data:
  path: corpus
  validation_fraction: 0.2
  sequence_length: 16
  global_batch_size: 4
  cache_directory: cache
throughput:
  every_n_batches: 1
"""


def surroundings() -> dict[str, str]:
    """The environment of a recipe: of a port of its own choice Lightning does not know that nobody takes it."""
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return os.environ | own | {"MASTER_PORT": str(free_port())}


def ends(session: int, seconds: float = 60.0) -> bool:
    """Whether no process of a session is left; one that has just closed its output may take a moment to go."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def recipe(
    folder: Path, *options: str, timeout: float = 600, script: str = "pretrain_gpt.py"
) -> subprocess.CompletedProcess[str]:
    """The recipe's run in `folder`, after which no process of it may be left."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "recipes" / script), *options],
        cwd=folder,
        env=surroundings(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    # It ends when the last process that holds the pipes has ended.
    out, err = process.communicate(timeout=timeout)
    assert ends(process.pid), "a process is left"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


EXPERTS = """
trainer:
  strategy:
    class_path: lightning_megatron.MegatronStrategy
    init_args:
      tensor_model_parallel_size: 1
      sequence_parallel: false
      expert_model_parallel_size: 2
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args:
      save_dir: logs
      name: experts
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args:
        every_n_train_steps: 2
        save_top_k: -1
        dirpath: experts
        filename: "{step}"
model:
  config:
    add_bias_linear: false
    moe:
      layer_freq: 2
      ffn_hidden_size: 64
      router:
        num_experts: 4
        aux_losses:
          - scope: global
            coefficient: 0.02
        bias_update_rate: 0.01
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("recipe")
    write_corpus(path)
    (path / "tiny.yaml").write_text(TINY)
    (path / "experts.yaml").write_text(EXPERTS)
    return path


def losses(folder: Path, version: int, name: str = "tiny") -> list[float]:
    with (folder / "logs" / name / f"version_{version}" / "metrics.csv").open(newline="") as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]


@pytest.mark.slow
def test_a_run_of_two_processes_is_resumed_on_another_layout_and_writes(folder: Path) -> None:
    first = recipe(folder, "fit", "--config", "tiny.yaml")
    assert first.returncode == 0, first.stderr
    one = losses(folder, 0)
    assert len(one) == 4 and one[3] < one[0]
    header = (folder / "logs" / "tiny" / "version_0" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train_loss", "val_loss", "tokens/s", "TFLOP/s/device"} <= set(header)

    resumed = launched(
        folder,
        *("fit", "--config", "tiny.yaml", "--ckpt_path", "saved/step=2.ckpt"),
        "--trainer.strategy.init_args.tensor_model_parallel_size=1",
        "--trainer.strategy.init_args.sequence_parallel=false",
        "--trainer.strategy.init_args.pipeline_model_parallel_size=2",
        "--trainer.strategy.init_args.num_microbatches=2",
        script="pretrain_gpt.py",
    )
    assert resumed.returncode == 0, resumed.stderr
    assert losses(folder, 1) == pytest.approx(one[2:], abs=1e-5)

    written = launched(
        folder,
        *("predict", "--config", "tiny.yaml", "--ckpt_path", "saved/step=4.ckpt", "--trainer.devices=1"),
        "--trainer.strategy.init_args.tensor_model_parallel_size=1",
        "--trainer.strategy.init_args.sequence_parallel=false",
        '--data.prompts=["the cat sat"]',
        script="pretrain_gpt.py",
        num_ranks=1,
    )
    assert written.returncode == 0, written.stderr
    assert "the cat sat" in written.stdout


@pytest.mark.slow
def test_experts_over_two_processes_are_resumed_on_another_layout_and_write(folder: Path) -> None:
    files = ("--config", "tiny.yaml", "--config", "experts.yaml")
    first = launched(folder, "fit", *files, script="pretrain_gpt.py")
    assert first.returncode == 0, first.stderr
    one = losses(folder, 0, "experts")
    assert len(one) == 4 and one[3] < one[0]
    resumed = launched(
        folder,
        *("fit", *files, "--ckpt_path", "experts/step=2.ckpt"),
        "--trainer.strategy.init_args.expert_model_parallel_size=1",
        "--trainer.strategy.init_args.pipeline_model_parallel_size=2",
        "--trainer.strategy.init_args.num_microbatches=2",
        script="pretrain_gpt.py",
    )
    assert resumed.returncode == 0, resumed.stderr
    assert losses(folder, 1, "experts") == pytest.approx(one[2:], abs=1e-5)
    written = launched(
        folder,
        *("predict", *files, "--ckpt_path", "experts/step=4.ckpt", '--data.prompts=["the cat sat", "a dog"]'),
        script="pretrain_gpt.py",
    )
    assert written.returncode == 0, written.stderr
    assert "the cat sat" in written.stdout and "a dog" in written.stdout


@pytest.mark.slow
def test_faults_that_show_before_the_start_start_no_process_and_are_reported_together(folder: Path) -> None:
    sizes = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
    ended = recipe(
        folder,
        *("fit", "--config", "tiny.yaml", "--config", "experts.yaml", "--data.path=nowhere", "--trainer.devices=3"),
        *("--model.config.moe.router.num_experts=5", "--model.config.moe.ffn_hidden_size=63"),
        *(f"--trainer.strategy.init_args.{name}=2" for name in sizes),
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    assert "Initializing distributed" not in ended.stdout + ended.stderr
    assert "world size (3)" in ended.stderr
    for shown in (
        "number of experts (5) must be a multiple of expert_model_parallel_size (2)",
        "ffn_hidden_size of an expert (63) must be a multiple of expert_tensor_parallel_size (2)",
        "needs sequence_parallel",
        "nowhere",
    ):
        assert ended.stderr.count(shown) == 1, ended.stderr


@pytest.mark.slow
def test_a_fault_that_all_ranks_meet_ends_them_with_one_message(folder: Path) -> None:
    # Found when the processes run already: there is text, but not enough of it.
    options = ("fit", "--config", "tiny.yaml", "--data.global_batch_size=4000")
    ended = launched(folder, *options, script="pretrain_gpt.py")
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    assert ended.stderr.count("too few for one global batch") == 1
