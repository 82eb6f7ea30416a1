"""What the doctor says of variables of the environment."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_megatron.cli.doctor.finding import Finding
from lightning_megatron.cli.doctor.launch import Launch
from lightning_megatron.cli.doctor.variables import is_of_interest, variable_findings
from tests.cli.doctor.cases import ALONE, TWO_MACHINES, TWO_RANKS, about, kinds

SLURM_RANKS = replace(TWO_RANKS, launcher="SLURM")


def findings_of(variables: dict[str, str], launch: Launch = ALONE, **changes: Any) -> list[Finding]:
    """What is said on a machine with two GPUs and three interfaces."""
    facts = {"num_gpus": 2, "num_cores": 16, "interfaces": ("lo", "eth0", "ib0"), "has_driver": True, **changes}
    return variable_findings(variables, launch, **facts)


def test_no_variable_is_ok() -> None:
    [finding] = findings_of({})
    assert finding.kind == "ok"


def test_variables_that_are_well_are_shown() -> None:
    variables = {
        "NCCL_SOCKET_IFNAME": "eth",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_DEBUG": "WARN",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "OMP_NUM_THREADS": "4",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "20000",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "MASTER_ADDR": "node1",
    }
    findings = findings_of(variables, TWO_MACHINES)
    assert kinds(findings) == {"ok"}
    assert {finding.about: finding.found for finding in findings} == variables
    assert all(is_of_interest(name) for name in variables)
    assert not is_of_interest("HOME")


@pytest.mark.parametrize(
    ("variables", "launch", "name", "kind", "words"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, ALONE, "CUDA_VISIBLE_DEVICES", "mind", "hides every GPU"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ALONE, "CUDA_VISIBLE_DEVICES", "mind", "hides every GPU"),
        ({"CUDA_VISIBLE_DEVICES": "0,0"}, ALONE, "CUDA_VISIBLE_DEVICES", "wrong", "twice"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,9"}, ALONE, "CUDA_VISIBLE_DEVICES", "wrong", "names 3 and torch sees 2"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, ALONE, "CUDA_DEVICE_MAX_CONNECTIONS", "mind", "one queue"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "64"}, ALONE, "CUDA_DEVICE_MAX_CONNECTIONS", "wrong", "'64'"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, ALONE, "CUDA_LAUNCH_BLOCKING", "mind", "waits for every kernel"),
        ({}, SLURM_RANKS, "OMP_NUM_THREADS", "mind", "not set, and 2 ranks"),
        ({"OMP_NUM_THREADS": "16"}, SLURM_RANKS, "OMP_NUM_THREADS", "mind", "16 threads x 2 ranks"),
        ({"OMP_NUM_THREADS": "many"}, ALONE, "OMP_NUM_THREADS", "wrong", "'many'"),
        ({"NCCL_SOCKET_IFNAME": "eth9"}, ALONE, "NCCL_SOCKET_IFNAME", "wrong", "(lo, eth0, ib0)"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, ALONE, "NCCL_SOCKET_IFNAME", "wrong", "none of this machine's"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, ALONE, "GLOO_SOCKET_IFNAME", "wrong", "none of this machine's"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, TWO_MACHINES, "GLOO_SOCKET_IFNAME", "wrong", "there are 2"),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, ALONE, "GLOO_SOCKET_IFNAME", "mind", "NCCL_SOCKET_IFNAME is ib0"),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, ALONE, "NCCL_SOCKET_IFNAME", "mind", "GLOO_SOCKET_IFNAME is ib0"),
        ({"NCCL_P2P_DISABLE": "1"}, ALONE, "NCCL_P2P_DISABLE", "mind", "over host memory"),
        ({"NCCL_SHM_DISABLE": "1"}, ALONE, "NCCL_SHM_DISABLE", "mind", "over the network"),
        ({"NCCL_IB_DISABLE": "1"}, ALONE, "NCCL_IB_DISABLE", "mind", "over TCP"),
        ({"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5"}, ALONE, "NCCL_IB_HCA", "wrong", "NCCL_IB_DISABLE uses none"),
        ({"NCCL_DEBUG": "INFO"}, ALONE, "NCCL_DEBUG", "mind", "prints much"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, ALONE, "TORCH_NCCL_BLOCKING_WAIT", "mind", "none is hidden"),
        (
            {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
            ALONE,
            "TORCH_NCCL_BLOCKING_WAIT",
            "wrong",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING is 1",
        ),
        (
            {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
            TWO_RANKS,
            "TORCH_NCCL_BLOCKING_WAIT",
            "mind",
            "none is hidden",
        ),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, ALONE, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "mind", "wait for ever"),
        (
            {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "0"},
            ALONE,
            "TORCH_NCCL_DUMP_ON_TIMEOUT",
            "wrong",
            "holds 0 collectives",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            ALONE,
            "PYTORCH_ALLOC_CONF",
            "wrong",
            "PYTORCH_CUDA_ALLOC_CONF says max_split_size_mb:64",
        ),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments"}, ALONE, "PYTORCH_ALLOC_CONF", "wrong", "name:value"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, ALONE, "PYTORCH_CUDA_ALLOC_CONF", "mind", "old name"),
        ({"NCCL_BLOCKING_WAIT": "1"}, ALONE, "NCCL_BLOCKING_WAIT", "mind", "old name"),
        ({"MASTER_PORT": "29500"}, ALONE, "MASTER_PORT", "mind", "no launcher is there"),
    ],
)
def test_each_variable_is_judged(variables: dict[str, str], launch: Launch, name: str, kind: str, words: str) -> None:
    finding = about(findings_of(variables, launch), name)
    assert finding.kind == kind and words in finding.found
    assert all(is_of_interest(one) for one in variables)


def test_fewer_gpus_than_ranks_are_wrong_and_none_is_not() -> None:
    finding = about(findings_of({}, TWO_RANKS, num_gpus=1), "GPUs of a rank")
    assert finding.kind == "wrong" and "2 ranks are on this machine and each sees 1" in finding.found
    assert "GPUs of a rank" not in {one.about for one in findings_of({}, TWO_RANKS, num_gpus=0)}


def test_devices_are_no_matter_where_no_driver_is() -> None:
    assert kinds(findings_of({"CUDA_VISIBLE_DEVICES": ""}, num_gpus=0, has_driver=False)) == {"ok"}


def test_interfaces_that_nccl_is_to_leave_out_are_left_out() -> None:
    without = {"NCCL_SOCKET_IFNAME": "^lo,docker", "GLOO_SOCKET_IFNAME": "eth0"}
    assert kinds(findings_of(without)) == {"ok"}
    all_of_them = {"NCCL_SOCKET_IFNAME": "^lo,eth,ib", "GLOO_SOCKET_IFNAME": "eth0"}
    assert about(findings_of(all_of_them), "NCCL_SOCKET_IFNAME").kind == "wrong"
