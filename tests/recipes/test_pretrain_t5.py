"""The recipe of T5s as a user runs it."""

from pathlib import Path

import pytest

from tests.lightning_modules.corpus import write_corpus
from tests.recipes import test_pretrain_gpt
from tests.recipes.launched import launched
from tests.recipes.test_pretrain_gpt import losses

TINY = (
    test_pretrain_gpt.TINY.partition("model:")[0]
    + """
model:
  config:
    num_layers: 1
    num_decoder_layers: 2
    hidden_size: 32
    num_attention_heads: 4
    vocab_size: 420
    max_sequence_length: 24
  optimizer:
    lr: 1.0e-2
    total_steps: 4
  generation:
    max_new_tokens: 8
data:
  path: corpus
  validation_fraction: 0.2
  sequence_length: 24
  decoder_sequence_length: 16
  global_batch_size: 4
  cache_directory: cache
throughput:
  every_n_batches: 1
"""
)


@pytest.mark.slow
def test_a_run_of_two_processes_is_resumed_on_stages_over_both_stacks_and_fills_gaps(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    first = launched(tmp_path, "fit", "--config", "tiny.yaml", script="pretrain_t5.py")
    assert first.returncode == 0, first.stderr
    one = losses(tmp_path, 0)
    assert len(one) == 4 and one[3] < one[0]
    header = (tmp_path / "logs" / "tiny" / "version_0" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train_loss", "val_loss", "tokens/s", "TFLOP/s/device"} <= set(header)
    stages = (
        "--trainer.strategy.init_args.tensor_model_parallel_size=1",
        "--trainer.strategy.init_args.sequence_parallel=false",
        "--trainer.strategy.init_args.pipeline_model_parallel_size=2",
        "--trainer.strategy.init_args.num_microbatches=2",
        "--trainer.strategy.init_args.pipeline.layout.text=Et|ttL",
    )
    resumed = launched(
        tmp_path, "fit", "--config", "tiny.yaml", "--ckpt_path", "saved/step=2.ckpt", *stages, script="pretrain_t5.py"
    )
    assert resumed.returncode == 0, resumed.stderr
    assert losses(tmp_path, 1) == pytest.approx(one[2:], abs=1e-5)
    written = launched(
        tmp_path,
        *("predict", "--config", "tiny.yaml", "--ckpt_path", "saved/step=4.ckpt", *stages),
        '--data.prompts=["the cat<extra_id_0> a mat", "home"]',
        script="pretrain_t5.py",
    )
    assert written.returncode == 0, written.stderr
    assert "--- text 0 ---" in written.stdout and written.stdout.count("--- text 1 ---") == 1
    # Once, not for each time that the prompts are read.
    assert written.stderr.count("1 of 2 prompts, the first of them 'home', have no gap") == 1


@pytest.mark.slow
def test_faults_that_show_before_the_start_are_reported_together(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    ended = launched(
        tmp_path,
        *("fit", "--config", "tiny.yaml", "--data.decoder_sequence_length=2", "--data.mask_prob=1.5"),
        *("--trainer.strategy.init_args.tensor_model_parallel_size=1", "--model.config.num_attention_heads=5"),
        *("--trainer.strategy.init_args.sequence_parallel=false", "--model.config.head_dim=8", "--trainer.devices=5"),
        "--trainer.strategy.init_args.pipeline_model_parallel_size=5",
        script="pretrain_t5.py",
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    assert "mask_prob (1.5)" in ended.stderr and "layers" in ended.stderr
