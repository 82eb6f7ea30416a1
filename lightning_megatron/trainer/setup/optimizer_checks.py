"""Checks of optimizers and callbacks before the first step, where a rank holds parts of the weights only."""

from collections.abc import Iterable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.separable import separable_faults
from lightning_megatron.optim.sharded_params import absent_names
from lightning_megatron.trainer.config import ConfigurationError

AVERAGING = (WeightAveraging, StochasticWeightAveraging)
"""Callbacks of Lightning's that average weights."""


def require_values(module: pl.LightningModule, world: Axis | None = None) -> None:
    """Raises RuntimeError for a module whose weights a fit that failed has left in shards, here or on a rank of
    `world`."""
    absent = absent_names(module.named_parameters())
    if world is not None:
        absent = collectives.merge_objects(absent, world, lambda names: sorted(set[str]().union(*names)))
    if absent:
        raise RuntimeError(
            f"{', '.join(absent)} have no values: a fit that sharded them failed, and each rank kept its shards alone "
            '(OptimizerConfig(kind="distributed_parameters")), or training made them NaN throughout: load a checkpoint '
            "into a new module; or they are copies that torch made of weights before these had values: copy "
            "weight.detach()"
        )


def require_separable(
    optimizers: Iterable[Optimizer], config: OptimizerConfig, mesh: Mesh, *, has_master_weights: bool
) -> None:
    """Raises ConfigurationError for an optimizer whose step of one weight needs more than this rank holds, or that runs
    forward and backward itself, where it steps master weights and not the model's."""
    faults, unknown = separable_faults(optimizers, config, mesh, has_master_weights=has_master_weights)
    # Every rank raises, also one that holds only whole matrices: the others would wait for it.
    everywhere = {fault for found in collectives.gather_objects(faults, mesh.axis("pp+tp")) for fault in found}
    if everywhere:
        raise ConfigurationError(sorted(everywhere))
    for name in unknown:
        rank_zero_warn(
            f"{name} is none of torch's own: its step of a weight is taken to look at no other weight, because a rank "
            "steps only some of them; one that looks at several (a rate found from all of them, a norm over them) "
            'gives other numbers than on one device. OptimizerConfig(update_scope="parameter") says that it does not'
        )


def require_fitting(callbacks: Iterable[pl.Callback], config: OptimizerConfig, has_master_weights: bool) -> None:
    """Raises ConfigurationError for callbacks that look for what is not there under master weights."""
    faults = []
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, BaseFinetuning) and has_master_weights:
            faults.append(
                f"{name} looks for the model's parameters in the optimizer, which has master weights; use precision "
                '32-true or bf16-true with OptimizerConfig(kind="replicated"), without cpu_offload'
            )
        is_averaging = isinstance(callback, AVERAGING)
        if is_averaging and config.shards_parameters and not config.gather_for_hooks:
            faults.append(
                f"{name} reads all weights of a rank between steps, and gather_for_hooks (False) gathers none there; "
                "leave gather_for_hooks out"
            )
        if isinstance(callback, ModelPruning) and config.shards_parameters:
            faults.append(
                f"{name} prunes and scores all weights of a rank, and with optimizer kind {config.kind!r} a rank holds "
                'parts of them; use kind "distributed_gradients"'
            )
        if is_averaging and not config.shards_parameters and config.overlap_param_gather:
            faults.append(
                f"{name} reads weights between a step and the next forward, while they are on their way; use "
                "OptimizerConfig(overlap_param_gather=False)"
            )
    if faults:
        raise ConfigurationError(faults)
