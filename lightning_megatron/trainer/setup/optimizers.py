"""Gradient buckets and master weights of a fit, made when it begins and released after it."""

from collections.abc import Iterable, Sequence

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_megatron.any_module.pipelined_modules import (
    gather_parts_by,
    names_inside,
    parameters_in_parts,
    pipelined_modules,
    stages_by_name,
)
from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Mesh, NewGroup
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.data_parallel_comm import DataParallelComm
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.hook_gradients import HookGradients
from lightning_megatron.optim.master_weights import MasterWeights
from lightning_megatron.optim.update_scope import is_elementwise
from lightning_megatron.trainer.precision import MegatronPrecision

# Packages whose callbacks do the same on all ranks.
_LIBRARIES = {__name__.partition(".")[0], "lightning", "pytorch_lightning"}


def has_master_weights(config: OptimizerConfig, plugin: MegatronPrecision) -> bool:
    """Whether optimizers step something else than the parameters, or gradients of another dtype."""
    return config.kind == "distributed" or plugin.low_dtype() is not None or plugin.gradient_dtype(config) is not None


def make_data_parallel_comm(
    module: pl.LightningModule,
    optimizers: Iterable[Optimizer],
    config: OptimizerConfig,
    plugin: MegatronPrecision,
    mesh: Mesh,
    new_group: NewGroup,
    device: torch.device,
) -> DataParallelComm:
    """Buckets for the gradients and, where configured, master weights in place of the optimizers' parameters.

    Collective over pp and the world, as `Gradients` is.
    """
    stepping = list(optimizers)
    gradients = Gradients(
        module.named_parameters(),
        names_inside(module),
        mesh,
        new_group,
        device,
        config=config,
        stages=stages_by_name(module),
        dtype=plugin.gradient_dtype(config),
        no_split=not all(is_elementwise(optimizer, config.update_scope) for optimizer in stepping),
        low=plugin.low_dtype(),
    )
    master_weights, hook_gradients = None, None
    if has_master_weights(config, plugin):
        master_weights = MasterWeights(gradients, stepping)
        hook_gradients = HookGradients(gradients) if gradient_hooks(module) else None
    parts = parameters_in_parts(module)
    dp_comm = DataParallelComm(gradients, master_weights, parts, hook_gradients)
    if config.overlap_param_gather:
        gather_parts_by(module, dp_comm.gather_part)
    return dp_comm


def gradient_hooks(module: pl.LightningModule, *, of_users: bool = False) -> list[str]:
    """Names of the code that may read gradients between a backward and the optimizer's step; `of_users`: and may change
    them, as this package's callbacks do not."""
    hooks = ("on_after_backward", "on_before_optimizer_step")
    return _overridden(module, (*hooks, "optimizer_step", "configure_gradient_clipping"), hooks, of_users=of_users)


def weight_hooks(module: pl.LightningModule) -> list[str]:
    """Names of a user's code that may change weights between an optimizer's step and the next."""
    loops = [f"on_{loop}_{end}" for loop in ("train_batch", "train_epoch", "validation") for end in ("start", "end")]
    hooks = (*loops, "on_validation_epoch_end", "on_before_zero_grad", "on_after_backward")
    return _overridden(module, (*hooks, "optimizer_step"), (*hooks, "on_before_optimizer_step"), of_users=True)


def _overridden(
    module: pl.LightningModule, of_module: Sequence[str], of_callbacks: Sequence[str], *, of_users: bool
) -> list[str]:
    """Which of these hooks the module and its callbacks have; `of_users`: none of this package's or Lightning's."""
    found = [f"{type(module).__name__}.{name}" for name in of_module if is_overridden(name, module)]
    if not module.automatic_optimization:
        found.append(f"{type(module).__name__}.training_step")
    for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
        if of_users and type(callback).__module__.partition(".")[0] in _LIBRARIES:
            continue
        found += [f"{type(callback).__name__}.{name}" for name in of_callbacks if is_overridden(name, callback)]
    return found


def names_of_stepped(module: nn.Module, optimizers: Iterable[Optimizer], mesh: Mesh) -> list[set[str]]:
    """Names, for each optimizer, of the pipelined models of whose weights it has some, on any stage."""
    own = []
    for optimizer in optimizers:
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        models = pipelined_modules(module).items()
        own.append({name for name, model in models if not stepped.isdisjoint(model.parameters())})
    by_rank = collectives.gather_objects(own, mesh.pp)
    return [set().union(*names) for names in zip(*by_rank, strict=True)]


def release(dp_comm: DataParallelComm, *, is_interrupted: bool) -> None:
    """Restores the module's dtypes and parameters, with the trained values.

    After a failure other data-parallel ranks may not take part: where that needs them, weights keep the dtype that they
    had in training.
    """
    if dp_comm.has_shards and is_interrupted:
        dp_comm.gradients.release()
    else:
        dp_comm.release()
