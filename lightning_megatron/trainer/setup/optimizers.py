"""The strategy's use of `optim`: what sums gradients and steps weights is made when a fit begins, and let go after."""

from collections.abc import Iterable

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from lightning_megatron.mesh import Mesh, NewGroup
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.data_parallel_comm import DataParallelComm
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.master_weights import MasterWeights
from lightning_megatron.optim.update_scope import is_elementwise
from lightning_megatron.trainer.precision import MegatronPrecision
from lightning_megatron.trainer.setup import setup_model


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
    """Buckets for the gradients and, where asked for, master weights in the place of the optimizers' parameters.

    Collective over pp and the world, as `Gradients` is.
    """
    stepping = list(optimizers)
    gradients = Gradients(
        module.named_parameters(),
        setup_model.names_inside(module),
        mesh,
        new_group,
        device,
        config=config,
        stages=setup_model.stages_by_name(module),
        dtype=plugin.gradient_dtype(config),
        no_split=not all(is_elementwise(optimizer, config.update_scope) for optimizer in stepping),
        low=plugin.low_dtype(),
    )
    master_weights = MasterWeights(gradients, stepping) if has_master_weights(config, plugin) else None
    dp_comm = DataParallelComm(gradients, master_weights, setup_model.parameters_in_parts(module))
    if config.overlap_param_gather:
        setup_model.gather_parts_by(module, dp_comm.gather_part)
    return dp_comm


def release(dp_comm: DataParallelComm, *, is_interrupted: bool) -> None:
    """Leaves the module as it came, but trained.

    After a failure other replicas may not come to that: where they would have to, weights keep the dtype that they had
    in training.
    """
    if dp_comm.has_shards and is_interrupted:
        dp_comm.gradients.release()
    else:
        dp_comm.release()
