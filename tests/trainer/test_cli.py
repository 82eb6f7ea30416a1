"""LightningCLI and YAML reach every argument of the strategy."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_megatron import MegatronStrategy, PipelineConfig
from tests.trainer.modules import Data, Small

STRATEGY = "--trainer.strategy=lightning_megatron.MegatronStrategy"
ARGUMENTS = [
    STRATEGY,
    "--trainer.strategy.tensor_model_parallel_size=2",
    "--trainer.strategy.pipeline_model_parallel_size=2",
    "--trainer.strategy.sequence_parallel=true",
    "--trainer.strategy.num_microbatches=4",
    "--trainer.strategy.timeout_seconds=90",
    "--trainer.strategy.pipeline.mode=collective",
    "--trainer.accelerator=cpu",
    "--trainer.devices=8",
    "--trainer.logger=false",
]


@pytest.fixture(autouse=True)
def bare_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning warns where there are arguments in two places."""
    monkeypatch.setattr("sys.argv", ["script"])


def parsed(arguments: list[str]) -> L.Trainer:
    trainer: L.Trainer = LightningCLI(Small, Data, run=False, args=arguments, seed_everything_default=0).trainer
    return trainer


def require_told(trainer: L.Trainer) -> None:
    strategy = trainer.strategy
    assert isinstance(strategy, MegatronStrategy)
    sizes = strategy.sizes
    assert (sizes.tp, sizes.pp, sizes.dp, sizes.sequence_parallel) == (2, 2, 2, True)
    assert strategy.num_microbatches == 4 and strategy.pipeline == PipelineConfig(mode="collective")


def test_arguments_reach_the_strategy() -> None:
    require_told(parsed(ARGUMENTS))


def test_a_printed_configuration_is_one_that_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed([*ARGUMENTS, "--print_config"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "tensor_model_parallel_size: 2" in printed and "mode: collective" in printed
    path = tmp_path / "run.yaml"
    path.write_text(printed)
    require_told(parsed([f"--config={path}"]))


def test_an_argument_of_a_wrong_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed([STRATEGY, "--trainer.strategy.tensor_model_parallel_size=many"])
    assert ended.value.code == 2
    assert "tensor_model_parallel_size" in capsys.readouterr().err


def test_the_name_alone_will_do() -> None:
    trainer = parsed(["--trainer.strategy=megatron", "--trainer.accelerator=cpu", "--trainer.logger=false"])
    assert isinstance(trainer.strategy, MegatronStrategy)


def test_a_mode_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"pipeline mode \('other'\) must be one of auto, collective"):
        PipelineConfig(mode="other")  # type: ignore[arg-type]


def test_a_schedule_of_steps_that_run_under_none_is_refused() -> None:
    settings: dict[str, Any] = {"schedule": "zb_v", "microbatch_group_size": 4, "overlap_expert_exchange": True}
    for name, value in settings.items():
        with pytest.raises(ValueError, match=rf"^{name} \({value!r}\) of the pipeline is for steps under a schedule"):
            PipelineConfig(mode="collective", **{name: value})
    with pytest.raises(ValueError, match=r"^schedule \('zb_v'\), microbatch_group_size \(4\), overlap"):
        PipelineConfig(mode="collective", **settings)
