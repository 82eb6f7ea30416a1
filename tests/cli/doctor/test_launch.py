"""Whom the doctor takes for the launcher: Lightning says the same; and what it says where variables are wrong."""

import os
import socket
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import (
    LightningEnvironment,
    LSFEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_megatron.cli.doctor.launch import Launch, launch_findings, launch_of
from tests.cli.doctor.cases import SLURM, TORCHRUN, about, kinds

LSF = {
    "LSB_JOBID": "77",
    "LSB_DJOB_RANKFILE": "ranks",
    "JSM_NAMESPACE_LOCAL_RANK": "0",
    "JSM_NAMESPACE_RANK": "0",
    "JSM_NAMESPACE_SIZE": "2",
}
KUBEFLOW = {
    "KUBERNETES_PORT": "tcp://10.0.0.1:443",
    "MASTER_ADDR": "pod-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "4",
    "RANK": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def chosen_by_lightning(variables: dict[str, str]) -> ClusterEnvironment:
    """What a Trainer takes for its launcher in an environment."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_", "LSB_", "JSM_"))]:
        del os.environ[name]
    os.environ.update(variables)
    with warnings.catch_warnings():
        # Of srun, which may lie on the machine.
        warnings.simplefilter("ignore")
        stub: Any = SimpleNamespace(_cluster_environment_flag=None)
        return _AcceleratorConnector._choose_and_init_cluster_environment(stub)


@pytest.mark.parametrize(
    ("variables", "launcher", "kind"),
    [
        ({}, "", LightningEnvironment),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "", LightningEnvironment),
        (TORCHRUN, "torchrun", TorchElasticEnvironment),
        ({**SLURM, **TORCHRUN}, "torchrun", TorchElasticEnvironment),
        (SLURM, "SLURM", SLURMEnvironment),
        ({**SLURM, "SLURM_JOB_NAME": "bash"}, "", LightningEnvironment),
        ({**SLURM, "SLURM_JOB_NAME": "interactive"}, "", LightningEnvironment),
        (LSF, "LSF", LSFEnvironment),
    ],
)
def test_the_launcher_is_the_one_that_lightning_finds(
    variables: dict[str, str], launcher: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ranks").write_text(f"login\n{socket.gethostname()}\n{socket.gethostname()}\n")
    assert launch_of(variables).launcher == launcher
    assert type(chosen_by_lightning(variables)) is kind


@pytest.mark.parametrize(
    "variables",
    [
        TORCHRUN,
        SLURM,
        {**SLURM, "SLURM_NODELIST": "host0,host1", "MASTER_PORT": "3333"},
        {**SLURM, "SLURM_NODELIST": "gpu[07,09-11]", "SLURM_JOB_ID": "42"},
        {**SLURM, "MASTER_ADDR": "node9"},
    ],
)
def test_ranks_and_the_place_to_meet_are_those_of_lightning(variables: dict[str, str]) -> None:
    launch, theirs = launch_of(variables), chosen_by_lightning(variables)
    assert (launch.rank, launch.world, launch.local_rank) == (
        theirs.global_rank(),
        theirs.world_size(),
        theirs.local_rank(),
    )
    assert (launch.address, launch.port) == (theirs.main_address, theirs.main_port)


def test_the_launch_has_the_numbers_of_the_launcher() -> None:
    assert launch_of({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}) == Launch(
        launcher="torchrun",
        rank=1,
        world=2,
        local_rank=1,
        local_world=2,
        num_nodes=1,
        address="node1",
        port=29500,
        is_store_there=True,
        attempt=3,
    )
    assert replace(launch_of(OPEN_MPI), address="") == Launch(
        launcher="Open MPI", rank=1, world=4, local_rank=1, local_world=2, num_nodes=2
    )
    # How many of the eight share a machine nobody tells.
    some = launch_of({**LSF, "JSM_NAMESPACE_SIZE": "8", "JSM_NAMESPACE_LOCAL_RANK": "3"})
    assert (some.world, some.local_rank, some.local_world, some.num_nodes) == (8, 3, 4, 1)
    told = launch_of({**LSF, "JSM_NAMESPACE_SIZE": "8", "JSM_NAMESPACE_LOCAL_SIZE": "4"})
    assert (told.local_world, told.num_nodes) == (4, 2)
    pod = launch_of(KUBEFLOW)
    assert (pod.launcher, pod.rank, pod.local_world, pod.num_nodes) == ("Kubeflow", 2, 1, 4)


@pytest.mark.parametrize("variables", [TORCHRUN, SLURM, {}], ids=["torchrun", "SLURM", "none"])
def test_a_launch_that_is_well_is_ok(variables: dict[str, str]) -> None:
    assert kinds(launch_findings(launch_of(variables), variables, has_mpi4py=False)) == {"ok"}


@pytest.mark.parametrize(
    ("variables", "name", "kind", "words"),
    [
        ({**TORCHRUN, "RANK": "2"}, "RANK", "wrong", "rank 2 is not below WORLD_SIZE (2)"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK", "wrong", "2 is not below LOCAL_WORLD_SIZE (2)"),
        ({**TORCHRUN, "RANK": "one"}, "RANK", "wrong", "'one' is no number"),
        ({**TORCHRUN, "WORLD_SIZE": "3"}, "WORLD_SIZE", "wrong", "3 ranks are not GROUP_WORLD_SIZE (1) x"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT", "wrong", "99999 is no port"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT", "wrong", "'http' is no number"),
        ({k: v for k, v in TORCHRUN.items() if k != "RANK"}, "RANK", "wrong", "is not there"),
        (
            {**TORCHRUN, "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
            "MASTER_ADDR",
            "wrong",
            "each machine's own address",
        ),
        (
            {k: v for k, v in SLURM.items() if k != "SLURM_NTASKS_PER_NODE"},
            "SLURM_NTASKS",
            "wrong",
            "SLURM_NTASKS_PER_NODE is not set",
        ),
        ({k: v for k, v in SLURM.items() if k != "SLURM_PROCID"}, "SLURM_PROCID", "wrong", "srun has not started"),
        ({**SLURM, "SLURM_NTASKS": "5"}, "SLURM_NTASKS", "wrong", "5 ranks are not SLURM_NNODES (2) x"),
        ({**SLURM, "SLURM_JOB_NAME": "bash"}, "SLURM_NTASKS", "mind", "4 tasks"),
        ({"LOCAL_RANK": "0"}, "launcher", "mind", "LOCAL_RANK=0"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK", "mind", "RANK=0, WORLD_SIZE=2"),
        (KUBEFLOW, "launcher", "mind", "Kubeflow"),
        (OPEN_MPI, "launcher", "wrong", "Open MPI has started 4 processes"),
    ],
)
def test_what_contradicts_itself_is_wrong(variables: dict[str, str], name: str, kind: str, words: str) -> None:
    finding = about(launch_findings(launch_of(variables), variables, has_mpi4py=False), name)
    assert finding.kind == kind and words in finding.found


def test_lightning_refuses_tasks_of_slurm_without_their_number_on_a_machine() -> None:
    with pytest.raises(RuntimeError, match="ntasks-per-node"):
        chosen_by_lightning({name: value for name, value in SLURM.items() if name != "SLURM_NTASKS_PER_NODE"})


def test_mpi_is_seen_with_mpi4py() -> None:
    assert kinds(launch_findings(launch_of(OPEN_MPI), OPEN_MPI, has_mpi4py=True)) == {"ok"}
