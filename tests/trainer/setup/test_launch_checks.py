"""Numbers of processes and time-outs that cannot be right are refused before a process is started."""

import subprocess
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import BatchSizeFinder

from lightning_megatron import MegatronStrategy
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.setup.launch_checks import launch_faults, queue_faults
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", started)


def under_torchrun(monkeypatch: pytest.MonkeyPatch, nodes: int, local: int) -> None:
    names = {
        "RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "ROLE_RANK": 0, "WORLD_SIZE": nodes * local,
        "LOCAL_WORLD_SIZE": local, "GROUP_WORLD_SIZE": nodes, "ROLE_WORLD_SIZE": nodes * local,
        "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1,
    }  # fmt: skip
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))


def faults_of(trainer: Any) -> str:
    with pytest.raises(ConfigurationError) as refused:
        trainer.fit(Small(), Data())
    return "\n".join(refused.value.faults)


def test_a_forgotten_num_nodes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    under_torchrun(monkeypatch, nodes=2, local=2)
    # Four processes fit this layout, and two do not; that is not what is wrong.
    assert faults_of(make_trainer(Layout(world=2, tp=2, pp=2, microbatches=2))) == (
        "num_nodes (1) x devices (2) of the Trainer is 2, but torchrun has started 4 processes (WORLD_SIZE=4, "
        "GROUP_WORLD_SIZE=2, LOCAL_WORLD_SIZE=2); use Trainer(num_nodes=2, devices=2)"
    )


def test_machines_that_nothing_brings_together_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    environment = LightningEnvironment()
    [fault] = launch_faults(environment, 2, 4)
    assert fault.startswith("num_nodes (2) of the Trainer needs the same command on each machine, with MASTER_ADDR")
    assert not launch_faults(environment, 1, 4)
    monkeypatch.setenv("NODE_RANK", "1")
    assert not launch_faults(environment, 2, 4)


def test_other_faults_are_those_of_the_processes_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    under_torchrun(monkeypatch, nodes=2, local=3)
    # The last rank of a machine has no device.
    for rank in ("0", "2"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        found = faults_of(make_trainer(Layout(world=2, tp=2, pp=2, microbatches=2)))
        assert "use Trainer(num_nodes=2, devices=3)" in found and "world size (6)" in found


@pytest.mark.parametrize(
    ("variables", "way_out"),
    [
        ({"SLURM_NTASKS": 16, "SLURM_NNODES": 2, "SLURM_NTASKS_PER_NODE": 8}, "use Trainer(num_nodes=2, devices=8)"),
        ({"SLURM_NTASKS": 15, "SLURM_NNODES": 2, "SLURM_NTASKS_PER_NODE": 8}, "give the numbers of the launcher"),
        ({"SLURM_NTASKS": 2, "SLURM_NNODES": 2, "SLURM_NTASKS_PER_NODE": 1}, ""),
        ({}, ""),
    ],
)
def test_a_job_of_slurm_says_how_many_it_has(
    variables: dict[str, int], way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    found = launch_faults(SLURMEnvironment(), 1, 2)
    assert len(found) == bool(way_out) and all(fault.endswith(way_out) and "num_nodes (1)" in fault for fault in found)


@pytest.mark.parametrize("seconds", [0, -5, float("nan"), float("inf"), 0.5])
def test_a_time_out_that_is_none_starts_no_process(seconds: Any) -> None:
    strategy = MegatronStrategy(tensor_model_parallel_size=2, timeout_seconds=seconds)
    found = faults_of(make_trainer(Layout(world=2), strategy=strategy))
    assert found.startswith(f"timeout_seconds ({seconds}) must be from 1 to 604800 (a week)")


def test_arguments_of_another_type_are_told_at_once_and_numbers_of_numpy_are_numbers() -> None:
    wrong: dict[str, Any] = {
        "tensor_model_parallel_size": "2",
        "sequence_parallel": "no",
        "num_microbatches": 2.0,
        "microbatch_size": True,
        "pipeline": "1f1b",
        "timeout_seconds": "60",
    }
    with pytest.raises(ConfigurationError) as refused:
        MegatronStrategy(**wrong)
    rules = ("int", "bool", "int", "int", "PipelineConfig or None", "float")
    assert refused.value.faults == [
        f"{name} ({value!r}) must be of type {rule}" for (name, value), rule in zip(wrong.items(), rules, strict=True)
    ]
    made = MegatronStrategy(tensor_model_parallel_size=np.int64(2), timeout_seconds=60)  # type: ignore[arg-type]
    assert made.sizes.tp == 2


def test_a_batch_size_is_not_looked_for_over_several_processes() -> None:
    found = faults_of(make_trainer(Layout(world=2), callbacks=[BatchSizeFinder()]))
    assert "BatchSizeFinder (Tuner.scale_batch_size)" in found and "over 2 processes a failure ends the run" in found


def test_one_queue_of_a_gpu_is_refused_under_stages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert queue_faults(1) == []
    [fault] = queue_faults(2)
    assert fault.startswith("CUDA_DEVICE_MAX_CONNECTIONS (1) puts") and "unset it" in fault
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert queue_faults(2) == []


def test_the_queues_of_a_gpu_are_looked_at_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    wrong = {"pipeline_model_parallel_size": 2, "num_microbatches": 2, "timeout_seconds": 0}
    trainer = make_trainer(Layout(world=2, pp=2, microbatches=2), strategy=MegatronStrategy(**wrong))
    assert "timeout_seconds" in (found := faults_of(trainer)) and "CUDA_DEVICE_MAX_CONNECTIONS" not in found
    monkeypatch.setattr(MegatronStrategy, "root_device", torch.device("cuda", 0))
    assert "timeout_seconds" in (found := faults_of(trainer)) and "CUDA_DEVICE_MAX_CONNECTIONS (1)" in found
