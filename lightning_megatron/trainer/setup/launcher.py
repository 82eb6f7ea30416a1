"""Lightning's launcher of one process per device, which first reports all errors of the configuration."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

Prepare = Callable[["pl.Trainer", tuple[Any, ...]], tuple[Any, ...]]


class CheckingLauncher(_SubprocessScriptLauncher):
    """Launches with the arguments that `prepare(trainer, arguments of fit, validate, test or predict)` returns.

    `prepare` raises where a run cannot work.
    """

    def __init__(self, environment: ClusterEnvironment, num_processes: int, num_nodes: int, prepare: Prepare) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._prepare = prepare

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """Whether a notebook can run it: it can run the only process, and cannot start a script's further ones."""
        return self._is_only_process

    @property
    def _is_only_process(self) -> bool:
        return self.num_processes * self.num_nodes == 1 and not self.cluster_environment.creates_processes_externally

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any
    ) -> Any:
        if trainer is not None:
            args = self._prepare(trainer, args)
        if self._is_only_process:
            # Lightning would set the environment of further processes, and watch them from a thread.
            return function(*args, **kwargs)
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def end_ranks(self, ranks: Sequence[int]) -> None:
        """Ends processes of global ranks that this process has started: one that is stopped would outlive the run."""
        first = self.cluster_environment.node_rank() * self.num_processes
        for local_rank, process in enumerate(self.procs, 1):
            if first + local_rank in ranks:
                process.kill()
