"""The recipe of LLaVA as a user runs it."""

from pathlib import Path

import pytest

from tests.data.test_image_samples import folder_with_rows
from tests.recipes import test_pretrain_gpt
from tests.recipes.launched import launched
from tests.recipes.test_pretrain_gpt import losses

RECIPE = "pretrain_llava.py"
TINY = (
    test_pretrain_gpt.TINY.partition("model:")[0]
    + """
model:
  config:
    num_layers: 2
    hidden_size: 32
    num_attention_heads: 4
    vocab_size: 300
    max_sequence_length: 300
    position: rotary
    image_token: 1
    vision:
      num_layers: 2
      hidden_size: 24
      num_attention_heads: 4
      image_size: 8
      patch_size: 4
  frozen: [vision]
  optimizer:
    lr: 1.0e-2
    total_steps: 4
data:
  path: rows.jsonl
  validation_fraction: 0.2
  sequence_length: 300
  global_batch_size: 4
  cache_directory: cache
throughput:
  every_n_batches: 1
"""
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = folder_with_rows(tmp_path_factory.mktemp("recipe"))
    (path / "tiny.yaml").write_text(TINY)
    return path


@pytest.mark.slow
def test_a_run_of_two_processes_is_resumed_on_another_layout_and_answers(folder: Path) -> None:
    first = launched(folder, "fit", "--config", "tiny.yaml", script=RECIPE)
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
        script=RECIPE,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert losses(folder, 1) == pytest.approx(one[2:], abs=1e-5)
    answered = launched(
        folder,
        *("predict", "--config", "tiny.yaml", "--ckpt_path", "saved/step=4.ckpt"),
        '--data.prompts=["what?", "more"]',
        '--data.prompt_images=[["0-0.png"], []]',
        script=RECIPE,
    )
    assert answered.returncode == 0, answered.stderr
    assert "USER: <image>\nwhat? ASSISTANT:" in answered.stdout and "USER: more ASSISTANT:" in answered.stdout


@pytest.mark.slow
def test_what_does_not_fit_ends_the_run_with_one_message(folder: Path) -> None:
    ended = launched(folder, "fit", "--config", "tiny.yaml", "--model.config.image_token=9", script=RECIPE)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    assert ended.stderr.count("image_token (9) must be the id of <image>") == 1
