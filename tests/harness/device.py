"""The device that Trainers of tests run on: the CPU, or under `pytest --device cuda` one GPU that all ranks share.

NCCL refuses two ranks of a host on one GPU. Each rank is therefore a node of its own, to Lightning by torchrun's
variables and to NCCL by `NCCL_HOSTID`; NCCL then takes its sockets, over the loopback device. That shows what a layout
computes on CUDA devices, in what order NCCL is called and whether calls wait for each other in a circle. It shows
nothing of the speed of several GPUs.
"""

import os
from typing import Any

# Environment variable that hands the choice to xdist's workers and to the ranks.
CHOICE = "LIGHTNING_MEGATRON_TEST_DEVICE"


def device_type() -> str:
    """`cpu` or `cuda`."""
    return os.environ.get(CHOICE, "cpu")


def trainer_devices(world: int) -> dict[str, Any]:
    """Arguments of a Trainer of so many ranks, each of which `rank_environment` has given its surroundings."""
    if device_type() == "cpu":
        return {"accelerator": "cpu", "devices": world}
    return {"accelerator": "gpu", "devices": 1, "num_nodes": world}


def rank_environment(rank: int, num_ranks: int) -> dict[str, str]:
    """What torchrun tells a rank of the nodes, and what NCCL must know so that the ranks may share a GPU."""
    if device_type() == "cpu":
        local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    else:
        local = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank, "GROUP_WORLD_SIZE": num_ranks}
        local |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": 1}
    return {name: str(value) for name, value in local.items()}
