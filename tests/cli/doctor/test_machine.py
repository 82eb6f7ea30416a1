"""What the doctor says of the host."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_megatron.cli.doctor.facts import Disk, FabricPort
from lightning_megatron.cli.doctor.launch import Launch
from lightning_megatron.cli.doctor.machine import machine_findings
from tests.cli.doctor.cases import ALONE, GB, MACHINE, TWO_MACHINES, TWO_RANKS, about, kinds, machine

DOWN = FabricPort(name="mlx5_1:1", is_active=False, rate="")


def test_a_machine_that_is_well_is_ok() -> None:
    findings = machine_findings(MACHINE, TWO_MACHINES, has_gloo_interface=False)
    assert kinds(findings) == {"ok"}
    assert about(findings, "host name").found == "node1 stands for 10.0.0.1"
    assert about(findings, "host memory").found == "60.0 GB of 64.0 GB free"


@pytest.mark.parametrize(
    ("changes", "launch", "name", "kind", "words"),
    [
        ({"free_memory_bytes": GB}, ALONE, "host memory", "mind", "1.0 GB of 64.0 GB free"),
        ({"free_memory_bytes": 3 * GB}, TWO_RANKS, "host memory", "mind", "for 2 ranks"),
        ({"free_memory_bytes": 3 * GB}, ALONE, "host memory", "ok", "3.0 GB"),
        ({"shared_memory_bytes": 64 * 2**20}, ALONE, "shared memory", "mind", "/dev/shm holds 67.1 MB"),
        ({"shared_memory_bytes": None}, ALONE, "shared memory", "mind", "no /dev/shm"),
        ({"open_files": 1024}, ALONE, "limit of open files", "mind", "1024"),
        ({"num_cores": 1}, TWO_RANKS, "cores", "mind", "2 ranks"),
        ({"num_cores": 1}, ALONE, "cores", "ok", "1"),
        ({"now_seconds": 1_700_000_000.0}, ALONE, "clock", "wrong", "2023-11-14 22:13:20 UTC, before"),
        ({"now_seconds": 1_790_000_000.0 - 60}, ALONE, "clock", "ok", "2026"),
        (
            {"fabric_ports": ()},
            TWO_MACHINES,
            "InfiniBand",
            "mind",
            "no adapter is there: messages between the 2 machines",
        ),
        ({"fabric_ports": ()}, ALONE, "InfiniBand", "ok", "no adapter is there"),
        (
            {"fabric_ports": (*MACHINE.fabric_ports, DOWN)},
            TWO_MACHINES,
            "InfiniBand",
            "mind",
            "NDR); not active: mlx5_1:1",
        ),
        ({"fabric_ports": (DOWN,)}, TWO_MACHINES, "InfiniBand", "mind", "not active: mlx5_1:1: messages between"),
        ({"host_fault": "not known"}, ALONE, "host name", "mind", "node1 stands for no address (not known)"),
        ({"host_fault": "not known"}, TWO_MACHINES, "host name", "wrong", "no address"),
        ({"addresses": ("127.0.1.1",)}, TWO_MACHINES, "host name", "wrong", "127.0.1.1"),
        ({"addresses": ("127.0.1.1",)}, TWO_RANKS, "host name", "ok", "127.0.1.1"),
        ({"main_fault": "not known"}, TWO_MACHINES, "MASTER_ADDR", "wrong", "node1 stands for no machine (not known)"),
    ],
)
def test_each_fact_is_judged(changes: dict[str, Any], launch: Launch, name: str, kind: str, words: str) -> None:
    finding = about(machine_findings(machine(**changes), launch, has_gloo_interface=False), name)
    assert finding.kind == kind and words in finding.found


def test_a_name_that_others_cannot_reach_is_no_matter_where_gloo_is_told_an_interface() -> None:
    findings = machine_findings(machine(addresses=("127.0.1.1",)), TWO_MACHINES, has_gloo_interface=True)
    assert about(findings, "host name").kind == "ok"


def test_the_limit_of_open_files_is_mended_as_far_as_it_can_be() -> None:
    few = machine(open_files=1024, most_open_files=1048576)
    assert (
        about(machine_findings(few, ALONE, has_gloo_interface=False), "limit of open files").mend == "ulimit -n 65536"
    )
    least = machine(open_files=1024, most_open_files=1024)
    assert "ask" in about(machine_findings(least, ALONE, has_gloo_interface=False), "limit of open files").mend


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"free_bytes": 5 * GB}, "mind"),
        ({"free_bytes": GB // 2}, "wrong"),
        ({"is_writable": False}, "mind"),
        ({}, "ok"),
    ],
)
def test_disks_are_judged(changes: dict[str, Any], kind: str) -> None:
    disk = replace(Disk(what="the working directory", path="runs", free_bytes=100 * GB, is_writable=True), **changes)
    findings = machine_findings(machine(disks=(disk,)), ALONE, has_gloo_interface=False)
    finding = about(findings, "the working directory")
    assert finding.kind == kind and "runs" in finding.found
