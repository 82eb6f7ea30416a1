"""`--optimizer` and `--lr_scheduler` of a recipe: any of torch's or of a package, in place of the module's own.

Weight decay acts on matrices alone, as under the module's own. Schedulers are stepped once per optimizer step, but one
that watches a metric once per epoch.
"""

import inspect
import pkgutil
from collections.abc import Mapping
from types import MethodType
from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser, ReduceLROnPlateau
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_megatron.lightning_modules.adamw import decay_groups
from lightning_megatron.optim.muon import Muon, muon_groups
from lightning_megatron.trainer.config import ConfigurationError

OPTIMIZER, SCHEDULER = "optimizer", "lr_scheduler"


def add_optimizer_options(parser: LightningArgumentParser) -> None:
    """Adds the options; without them a module has its own optimizer and scheduler."""
    parser.add_optimizer_args(nested_key=OPTIMIZER)
    parser.add_lr_scheduler_args(nested_key=SCHEDULER)


def use_optimizer(
    module: L.LightningModule, optimizer: Mapping[str, Any] | None, scheduler: Mapping[str, Any] | None
) -> None:
    """Gives a module the optimizer and the scheduler of the options: class_path and init_args of each.

    Raises ConfigurationError for a scheduler without an optimizer.
    """
    if not optimizer:
        if scheduler:
            raise ConfigurationError(
                f"--{SCHEDULER} ({scheduler['class_path']}) needs an --{OPTIMIZER}; without one the curve is that of "
                "model.optimizer, by its decay_style"
            )
        return
    rank_zero_info(f"--{OPTIMIZER} {optimizer['class_path']}: the values of model.optimizer have no effect")

    def configure_optimizers(self: L.LightningModule) -> Any:
        made = chosen_optimizer(self, optimizer)
        if not scheduler:
            return made
        chosen = _made(scheduler, made)
        if isinstance(chosen, ReduceLROnPlateau):
            return {"optimizer": made, "lr_scheduler": {"scheduler": chosen, "monitor": chosen.monitor}}
        return {"optimizer": made, "lr_scheduler": {"scheduler": chosen, "interval": "step"}}

    # The module is this run's alone. LightningCLI's own option does the same, with parameters that there are not yet.
    module.configure_optimizers = MethodType(configure_optimizers, module)  # type: ignore[method-assign]


def chosen_optimizer(module: nn.Module, init: Mapping[str, Any]) -> Optimizer:
    """The optimizer of a module's parameters with this class_path and init_args. Raises ConfigurationError with what it
    says of them."""
    kind, settings = pkgutil.resolve_name(init["class_path"]), dict(init.get("init_args") or {})
    known = inspect.signature(kind).parameters
    default = known["weight_decay"].default if "weight_decay" in known else 0.0
    weight_decay = settings.get("weight_decay", default) or 0.0
    parameters: Any = list(module.parameters())
    if kind is Muon:
        parameters = muon_groups(module.named_parameters(), weight_decay=weight_decay)
    elif weight_decay:
        parameters = decay_groups(module.named_parameters(), weight_decay)
    made: Optimizer = _made(init, parameters)
    return made


def _made(init: Mapping[str, Any], first: Any) -> Any:
    """An instance of a class, made with `first` and its settings. Raises ConfigurationError with what it says."""
    try:
        return pkgutil.resolve_name(init["class_path"])(first, **dict(init.get("init_args") or {}))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{init['class_path']} cannot be made: {' '.join(str(error).split())}") from error
