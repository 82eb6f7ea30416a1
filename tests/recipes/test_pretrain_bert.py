"""The recipe of BERT as a user runs it."""

from pathlib import Path

import pytest

from tests.lightning_modules.sentences import write_sentences
from tests.recipes.launched import launched
from tests.recipes.test_pretrain_gpt import TINY, losses

BERT = TINY.replace("name: tiny", "name: bert").replace("16", "24")

NEW_WEIGHTS = "predict without --ckpt_path runs a model with new weights"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("recipe")
    write_sentences(path)
    (path / "bert.yaml").write_text(BERT)
    return path


@pytest.mark.slow
def test_a_run_of_two_processes_is_resumed_on_another_layout_and_fills_gaps(folder: Path) -> None:
    first = launched(folder, "fit", "--config", "bert.yaml", script="pretrain_bert.py")
    assert first.returncode == 0, first.stderr
    one = losses(folder, 0, "bert")
    assert len(one) == 4 and one[3] < one[0]
    header = (folder / "logs" / "bert" / "version_0" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train_loss", "val_loss", "tokens/s", "TFLOP/s/device"} <= set(header)

    resumed = launched(
        folder,
        *("fit", "--config", "bert.yaml", "--ckpt_path", "saved/step=2.ckpt"),
        "--trainer.strategy.init_args.tensor_model_parallel_size=1",
        "--trainer.strategy.init_args.sequence_parallel=false",
        "--trainer.strategy.init_args.pipeline_model_parallel_size=2",
        "--trainer.strategy.init_args.num_microbatches=2",
        script="pretrain_bert.py",
    )
    assert resumed.returncode == 0, resumed.stderr
    assert losses(folder, 1, "bert") == pytest.approx(one[2:], abs=1e-5)

    filled = launched(
        folder,
        *("predict", "--config", "bert.yaml", "--ckpt_path", "saved/step=4.ckpt"),
        '--data.prompts=["The cat[MASK] on a mat."]',
        # As where each run has a folder of its own.
        "--trainer.callbacks.ModelCheckpoint.dirpath=elsewhere",
        script="pretrain_bert.py",
    )
    assert filled.returncode == 0, filled.stderr
    assert "--- text 0 ---\nThe cat" in filled.stdout and "on a mat." in filled.stdout
    assert not any(token in filled.stdout for token in ("[CLS]", "[SEP]", "[MASK]"))
    assert NEW_WEIGHTS not in filled.stderr and "dirpath has changed" not in filled.stderr


@pytest.mark.slow
def test_prompts_without_a_gap_are_reported_and_end_without_a_traceback(folder: Path) -> None:
    ended = launched(folder, "predict", "--config", "bert.yaml", '--data.prompts=["a", "b"]', script="pretrain_bert.py")
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    assert ended.stderr.count("has no [MASK]") == 2
    # Nor is there a checkpoint.
    assert NEW_WEIGHTS in ended.stderr
