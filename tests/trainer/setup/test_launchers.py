"""Launchers that are not here: with the variables that they set, ranks find each other and train as one device does."""

import os
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import KubeflowEnvironment, LightningEnvironment
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from lightning_megatron import MegatronStrategy
from tests.harness.ranks import free_port, run_on_ranks
from tests.trainer.fits import Parts, parts_apart, weights
from tests.trainer.layouts import PLAIN, Layout, make_trainer
from tests.trainer.modules import Data, Small

NAMES = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "NODE_", "TORCHELASTIC_", "PET_")
# Sums in another order, in float64.
TOLERANCE = 1e-12


def launched_by(**variables: object) -> None:
    """Takes what the harness has set, as torchrun, out of the environment, and puts another launcher's variables in."""
    for name in [name for name in os.environ if name.startswith(NAMES)]:
        del os.environ[name]
    os.environ.update({name: str(value) for name, value in variables.items()})


class HeldParts(L.Callback):
    """What this rank holds at the end of a fit."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.held = weights(pl_module)


def trained(**options: Any) -> Parts:
    """Weights of this rank after four steps on rows of its own data-parallel rank."""
    module, parts = Small(), HeldParts()
    make_trainer(**{"layout": Layout(world=2), "max_steps": 4, "callbacks": parts, **options}).fit(module, Data())
    return parts.held


def operator(rank: int, num_pods: int, port: int) -> dict[str, object]:
    """What the training operator of Kubeflow sets in a pod of a PyTorchJob, beside torchrun's own variables."""
    return {
        "KUBERNETES_PORT": "tcp://10.0.0.1:443",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RANK": rank,
        "WORLD_SIZE": num_pods,
    }


def pod(port: int) -> list[Parts]:
    """A pod of two whose command is torchrun without options: two ranks of four."""
    rank = int(os.environ["RANK"])
    pet = {"NNODES": 2, "NODE_RANK": rank, "NPROC_PER_NODE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    launched_by(**operator(rank, 2, port), **{f"PET_{name}": value for name, value in pet.items()})
    config, _, _ = config_from_args(parse_args(["train.py"]))
    # The libraries are loaded here already.
    config.start_method, config.monitor_interval = "fork", 0.1
    return list(elastic_launch(config, rank_of_pod)().values())


def rank_of_pod() -> Parts:
    return trained(layout=Layout(world=4, tp=2, pp=2, microbatches=2), devices=2, num_nodes=2)


def lone_pod(port: int) -> list[Parts]:
    """A pod of two with one process, which no torchrun has started."""
    launched_by(**operator(int(os.environ["RANK"]), 2, port))
    strategy = MegatronStrategy(tensor_model_parallel_size=2, cluster_environment=KubeflowEnvironment())
    return [trained(strategy=strategy, devices=1, num_nodes=2)]


class WorkerEnvironment(LightningEnvironment):
    """Ray's environment for Lightning, with places read from variables and not from Ray's context."""

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def global_rank(self) -> int:
        return int(os.environ["RANK"])

    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    def node_rank(self) -> int:
        return int(os.environ["NODE_RANK"])

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass

    def teardown(self) -> None:
        pass


def ray_worker(port: int) -> list[Parts]:
    """A worker of Ray Train, which finds the process group there already."""
    rank = int(os.environ["RANK"])
    place = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    launched_by(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **place)
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=2)
    strategy = MegatronStrategy(pipeline_model_parallel_size=2, cluster_environment=WorkerEnvironment())
    return [trained(strategy=strategy, devices=2)]


def on_one_device() -> Parts:
    return trained(layout=PLAIN)


@pytest.mark.parametrize("started", [pod, lone_pod, ray_worker])
def test_ranks_of_another_launcher_train_as_one_device_does(started: Callable[[int], list[Parts]]) -> None:
    [wanted] = run_on_ranks(1, on_one_device, init=False)
    found = [parts for own in run_on_ranks(2, started, free_port(), init=False) for parts in own]
    assert len(found) == (4 if started is pod else 2)
    assert all(parts_apart(parts, wanted) < TOLERANCE for parts in found)
    # Each has a part alone, so that they have trained together.
    sizes = [sum(part.numel() for _, part in parts.values()) for parts in found]
    assert max(sizes) < sum(part.numel() for _, part in wanted.values())
