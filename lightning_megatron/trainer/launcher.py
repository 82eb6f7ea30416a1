"""Lightning's launcher of one process per device, with all faults of the configuration told before the first starts."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

Check = Callable[["pl.Trainer", tuple[Any, ...]], None]


class CheckingLauncher(_SubprocessScriptLauncher):
    """Asks `check(trainer, arguments of fit, validate, test or predict)` first; that raises where a run cannot work."""

    def __init__(self, environment: ClusterEnvironment, num_processes: int, num_nodes: int, check: Check) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._check = check

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any
    ) -> Any:
        if trainer is not None:
            self._check(trainer, args)
        return super().launch(function, *args, trainer=trainer, **kwargs)
