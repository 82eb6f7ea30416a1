"""Machines as the doctor finds them, for its tests: one that is well, to be changed in one thing."""

from dataclasses import replace
from typing import Any

from lightning_megatron.cli.doctor.facts import Disk, FabricPort, FoundGpu, MachineFacts, TorchFacts
from lightning_megatron.cli.doctor.finding import Finding, Kind
from lightning_megatron.cli.doctor.launch import Launch

GB = 10**9
H200 = FoundGpu(name="H200", memory_bytes=150 * GB, free_bytes=149 * GB, capability=(9, 0))
TORCH = TorchFacts(
    built_for="CUDA 13.0",
    backends=("gloo", "nccl"),
    nccl="2.29.7",
    archs=("sm_80", "sm_90", "compute_90"),
    gpus=(H200, H200),
)
CPU_TORCH = TorchFacts(backends=("gloo",))
MACHINE = MachineFacts(
    host="node1",
    addresses=("10.0.0.1",),
    interfaces=("lo", "eth0", "ib0"),
    fabric_ports=(FabricPort(name="mlx5_0:1", is_active=True, rate="400 Gb/sec (4X NDR)"),),
    driver="580.65.06",
    num_cores=16,
    memory_bytes=64 * GB,
    free_memory_bytes=60 * GB,
    shared_memory_bytes=32 * GB,
    open_files=65536,
    most_open_files=65536,
    now_seconds=1_800_000_000.0,
    files_seconds=1_790_000_000.0,
    disks=(Disk(what="the working directory", path="runs", free_bytes=100 * GB, is_writable=True),),
)
ALONE = Launch()
TWO_RANKS = Launch(launcher="torchrun", world=2, local_world=2, address="127.0.0.1", port=29500)
TWO_MACHINES = Launch(
    launcher="torchrun", world=4, local_world=2, num_nodes=2, address="node1", port=29500, is_store_there=True
)
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NAME": "train",
    "SLURM_NODELIST": "node[5-6]",
}


def machine(**changes: Any) -> MachineFacts:
    """The machine that is well, changed."""
    return replace(MACHINE, **changes)


def about(findings: list[Finding], name: str) -> Finding:
    """The finding about a thing; of several, the first that is not ok."""
    of_it = [finding for finding in findings if finding.about == name]
    assert of_it, (name, [finding.about for finding in findings])
    return next((finding for finding in of_it if finding.kind != "ok"), of_it[0])


def kinds(findings: list[Finding]) -> set[Kind]:
    """The kinds of findings."""
    return {finding.kind for finding in findings}
