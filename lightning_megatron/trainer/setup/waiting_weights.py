"""Weights before data-parallel ranks cut them: they wait in host memory, or have no values yet.

A fit with sharded parameters makes the networks of `configure_model` in host memory, and models of this package without
values. When the optimizers are known each rank copies, draws or reads its shards (`optim.sharded_params`).
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.gradients import can_be_sharded
from lightning_megatron.sharding import sharded_parameters
from lightning_megatron.tensor.weight_gradients import has_gradient_hooks
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.transformer.init import drawn_later


def are_cut(config: OptimizerConfig, mesh: Mesh) -> bool:
    """Whether a fit cuts parameters over data-parallel ranks."""
    return config.shards_parameters and any(mesh.axis(name).size > 1 for name in ("dp+cp", "edp"))


@contextmanager
def made_waiting() -> Iterator[None]:
    """The block in which networks are made whose weights wait."""
    with torch.device("cpu"), drawn_later():
        yield


def move_others(module: nn.Module, device: torch.device) -> None:
    """Moves all of a module to a device but the weights that may be cut."""
    waiting = {id(parameter) for parameter in module.parameters() if can_be_sharded(parameter)}

    def moved(x: Tensor) -> Tensor:
        return x if id(x) in waiting else x.to(device)

    # What Lightning does beside it, in its `to`.
    _update_properties(module, device=device)
    module._apply(moved)


def require_unwritten(module: pl.LightningModule) -> None:
    """Raises ConfigurationError for weights without values that somebody wrote to, refers to weakly, or whose gradients
    have hooks: all that would be lost."""
    waiting = [(name, one, shard.later) for name, one, shard in sharded_parameters(module) if shard.later is not None]
    written = [name for name, one, later in waiting if one._version != later.version]
    hooked = [name for name, one, _ in waiting if has_gradient_hooks(one)]
    referred = [name for name, one, _ in waiting if weakref.getweakrefs(one)]
    faults = [
        f"weights {what} before they have values ({', '.join(names[:6])}): with OptimizerConfig("
        'kind="distributed_parameters") each rank of a fit draws, or reads, its shards of a model alone once the '
        f"optimizers are there; {way}, or make the model in __init__, where all its values are in host memory"
        for names, what, way in (
            (written, "were written to", "change weights in on_fit_start"),
            (hooked, "were given hooks", "set the hooks of gradients in on_fit_start"),
            (referred, "were referred to weakly", "make what refers to them in on_fit_start"),
        )
        if names
    ]
    if faults:
        raise ConfigurationError(faults)
