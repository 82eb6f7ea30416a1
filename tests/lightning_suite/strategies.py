"""The strategies that are put in: of one process, of two in lockstep, and in place of DDP, by Lightning's launchers."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from typing_extensions import override

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint import CheckpointConfig

NUM_LOCKSTEP_RANKS = 2

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class LockstepEnvironment(ClusterEnvironment):
    """Two processes of one machine that run the same test; the master listens on a port of this test alone."""

    def __init__(self, rank: int, port: int) -> None:
        super().__init__()
        self._rank = rank
        self._port = port

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    @override
    def main_port(self) -> int:
        return self._port

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return NUM_LOCKSTEP_RANKS

    @override
    def set_world_size(self, size: int) -> None:
        pass

    @override
    def global_rank(self) -> int:
        return self._rank

    @override
    def set_global_rank(self, rank: int) -> None:
        pass

    @override
    def local_rank(self) -> int:
        return self._rank

    @override
    def node_rank(self) -> int:
        return 0


class ProcessesLauncher(_MultiProcessingLauncher):
    """Lightning's launcher of forked or spawned processes, after the checks of a run."""

    def __init__(
        self,
        strategy: MegatronStrategy,
        start_method: Literal["spawn", "fork", "forkserver"],
        prepare: Callable[["pl.Trainer", tuple[Any, ...]], tuple[Any, ...]],
    ) -> None:
        super().__init__(strategy, start_method)
        self._prepare = prepare

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any
    ) -> Any:
        if trainer is not None:
            args = self._prepare(trainer, args)
        return super().launch(function, *args, trainer=trainer, **kwargs)


class ProcessesStrategy(MegatronStrategy):
    """A MegatronStrategy that starts its processes as `ddp_spawn` and `ddp_fork` do."""

    def __init__(self, start_method: Literal["spawn", "fork", "forkserver"], **options: Any) -> None:
        super().__init__(**options)
        self._start_method: Literal["spawn", "fork", "forkserver"] = start_method

    @override
    def _configure_launcher(self) -> None:
        self._launcher = ProcessesLauncher(self, self._start_method, self._prepare_run)


def for_one_process(timeout_seconds: float) -> Strategy:
    """The strategy at world size 1."""
    return MegatronStrategy(checkpoint=single_file(), timeout_seconds=timeout_seconds)


def for_lockstep(rank: int, port: int, timeout_seconds: float) -> Strategy:
    """The strategy of one of two ranks under tp 2."""
    return MegatronStrategy(
        tensor_model_parallel_size=NUM_LOCKSTEP_RANKS,
        checkpoint=single_file(),
        timeout_seconds=timeout_seconds,
        parallel_devices=[torch.device("cpu")] * NUM_LOCKSTEP_RANKS,
        cluster_environment=LockstepEnvironment(rank, port),
    )


def ddp_for_lockstep(rank: int, port: int, timeout_seconds: float) -> Strategy:
    """Lightning's own DDP of one of two ranks: what it fails in lockstep is no matter of ours."""
    return DDPStrategy(
        parallel_devices=[torch.device("cpu")] * NUM_LOCKSTEP_RANKS,
        cluster_environment=LockstepEnvironment(rank, port),
        process_group_backend="gloo",
        timeout=timedelta(seconds=timeout_seconds),
    )


def in_place_of(ddp: DDPStrategy, timeout_seconds: float) -> Strategy:
    """The strategy of data-parallel ranks that are started as those of `ddp`."""
    options: dict[str, Any] = {"checkpoint": single_file(), "timeout_seconds": timeout_seconds}
    start_method: StartMethod = ddp._start_method
    return MegatronStrategy(**options) if start_method == "popen" else ProcessesStrategy(start_method, **options)


def single_file() -> CheckpointConfig:
    """Checkpoints as the files that Lightning writes, which its tests open."""
    return CheckpointConfig(kind="file")
