"""Faults in settings of gradients and loss scales are reported at once, each with its value and its rule."""

import dataclasses
from typing import Any

import pytest

from lightning_megatron.optim.config import LossScaleConfig, OptimizerConfig


def test_all_faults_of_an_optimizer_config_are_reported_together() -> None:
    wrong: dict[str, Any] = {
        "kind": "zero3",
        "grad_dtype": "float16",
        "on_nonfinite": "warn",
        "update_scope": "matrix",
        "bucket_size": -5,
        "check_replicas_every_n_steps": -2,
    }
    with pytest.raises(ValueError) as error:
        OptimizerConfig(**wrong)
    lines = str(error.value).splitlines()
    assert lines == [
        "optimizer kind ('zero3') must be one of replicated, distributed, distributed_gradients, "
        "distributed_parameters",
        "optimizer grad_dtype ('float16') must be one of auto, float32, bfloat16",
        "optimizer on_nonfinite ('warn') must be one of stop, skip, ignore",
        "optimizer update_scope ('matrix') must be one of auto, elementwise, parameter",
        "bucket_size (-5) must be at least 1; it counts elements, 40000000 is usual",
        "check_replicas_every_n_steps (-2) must be at least -1; 0 checks the first three steps, -1 none",
    ]


@pytest.mark.parametrize("size", [0, -1])
def test_a_bucket_holds_at_least_one_number(size: int) -> None:
    with pytest.raises(ValueError, match=rf"bucket_size \({size}\)"):
        OptimizerConfig(bucket_size=size)
    assert OptimizerConfig(bucket_size=1).bucket_size == 1


def test_weights_that_nobody_else_steps_are_not_gathered() -> None:
    with pytest.raises(ValueError, match=r"overlap_param_gather \(True\) needs a distributed kind"):
        OptimizerConfig(overlap_param_gather=True)
    assert OptimizerConfig(kind="distributed", overlap_param_gather=True).overlap_param_gather


@pytest.mark.parametrize("field", ["reshard_after_forward", "gather_for_hooks"])
def test_settings_of_sharded_parameters_act_with_those_alone(field: str) -> None:
    with pytest.raises(ValueError, match=rf"{field} \(False\) acts with kind .distributed_parameters. alone"):
        OptimizerConfig(kind="distributed_gradients", **{field: False})  # type: ignore[arg-type]
    sharded = OptimizerConfig(kind="distributed_parameters", **{field: False})  # type: ignore[arg-type]
    assert sharded.shards_parameters and sharded.shards_gradients


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("minimum", 0.0),
        ("initial", 0.5),
        ("growth_factor", 0.9),
        ("backoff_factor", 0.0),
        ("backoff_factor", 1.5),
        ("window", 0),
        ("hysteresis", 0),
    ],
)
def test_a_wrong_number_of_a_loss_scale_is_reported_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^loss scale {field} \({value}\)"):
        LossScaleConfig(**{field: value})  # type: ignore[arg-type]


def test_all_faults_of_a_loss_scale_are_reported_together() -> None:
    with pytest.raises(ValueError) as error:
        LossScaleConfig(minimum=2.0, initial=1.0, growth_factor=0.5, backoff_factor=2.0, window=0, hysteresis=-1)
    assert len(str(error.value).splitlines()) == 5


def test_configs_are_values() -> None:
    assert OptimizerConfig() == OptimizerConfig() and hash(OptimizerConfig()) == hash(OptimizerConfig())
    with pytest.raises(dataclasses.FrozenInstanceError):
        OptimizerConfig().kind = "distributed"  # type: ignore[misc]
