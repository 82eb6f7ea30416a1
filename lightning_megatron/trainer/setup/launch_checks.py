"""Check what a launcher has set: as many processes as the Trainer was told, and a queue for each stream of a GPU."""

import os
from collections.abc import Mapping

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment, _is_slurm_interactive_mode
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

# By launcher: variables of the number of all processes, of the machines, and of the processes of one machine.
_VARIABLES = {
    "torchrun": ("WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "SLURM": ("SLURM_NTASKS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE"),
}

# Variables of Lightning's own launcher on several machines; without one of them each takes itself for the first.
_OF_MACHINES = ("MASTER_ADDR", "NODE_RANK", "GROUP_RANK")
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def num_started(environment: ClusterEnvironment | None) -> int | None:
    """Number of processes that a launcher has started; None where Lightning starts them, or nothing tells it."""
    launcher = _launcher_of(environment)
    return None if launcher is None else _found(launcher).get(_VARIABLES[launcher][0])


def launch_faults(environment: ClusterEnvironment | None, num_nodes: int, num_processes: int) -> list[str]:
    """Errors of `num_nodes` and `devices` of the Trainer, as against what the launcher says of itself."""
    # Classes of others, as Ray's, know the machines in their own way.
    is_alone = type(environment) is LightningEnvironment and os.environ.keys().isdisjoint(_OF_MACHINES)
    if is_alone and num_nodes > 1:
        return [
            f"num_nodes ({num_nodes}) of the Trainer needs the same command on each machine, with MASTER_ADDR, "
            "MASTER_PORT and NODE_RANK in its environment, which are not there: the other machines would be waited for "
            "in vain; start it by torchrun, or use num_nodes=1"
        ]
    launcher, started, wanted = _launcher_of(environment), num_started(environment), num_nodes * num_processes
    if launcher is None or started in (None, wanted):
        return []
    found = _found(launcher)
    _, nodes_variable, local_variable = _VARIABLES[launcher]
    nodes, local = found.get(nodes_variable), found.get(local_variable)
    is_known = nodes is not None and local is not None and nodes * local == started
    way_out = f"use Trainer(num_nodes={nodes}, devices={local})" if is_known else "give the numbers of the launcher"
    variables = ", ".join(f"{name}={value}" for name, value in found.items())
    return [
        f"num_nodes ({num_nodes}) x devices ({num_processes}) of the Trainer is {wanted}, but {launcher} has started "
        f"{started} processes ({variables}); {way_out}"
    ]


def queue_faults(num_stages: int) -> list[str]:
    """Errors of CUDA_DEVICE_MAX_CONNECTIONS, the number of queues that a GPU takes work from, for a run on GPUs."""
    if os.environ.get(_QUEUES) != "1" or num_stages == 1:
        return []
    return [
        f"{_QUEUES} (1) puts the work of all streams into one queue, and there a receive, which a pipeline posts ahead "
        "of its message, holds up the products that its sender waits for; unset it: 8 is CUDA's default"
    ]


def _launcher_of(environment: ClusterEnvironment | None) -> str | None:
    if isinstance(environment, TorchElasticEnvironment):
        return "torchrun"
    # In an interactive job Lightning's processes are not those of the job.
    return "SLURM" if isinstance(environment, SLURMEnvironment) and not _is_slurm_interactive_mode() else None


def _found(launcher: str) -> Mapping[str, int]:
    texts = {name: os.environ.get(name, "") for name in _VARIABLES[launcher]}
    return {name: int(text) for name, text in texts.items() if text.isdecimal()}
