"""Checks of optimizers and callbacks before the first step, where a rank holds parts of the weights only."""

from collections.abc import Iterable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.sharded_params import absent_names
from lightning_megatron.optim.update_scope import update_scope_of
from lightning_megatron.sharding import Shard, shard_of
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.precision import needs_closure

AVERAGING = (WeightAveraging, StochasticWeightAveraging)
"""Callbacks of Lightning's that average weights."""

_SEPARABLE = (
    "use an optimizer that treats each number by itself, as SGD or AdamW do, or ranks that hold whole models and the "
    "replicated optimizer in 32-true"
)


def require_values(module: pl.LightningModule, world: Axis | None = None) -> None:
    """Raises RuntimeError for a module whose weights a fit that failed has left in shards, here or on a rank of
    `world`."""
    absent = absent_names(module.named_parameters())
    if world is not None:
        absent = collectives.merge_objects(absent, world, lambda names: sorted(set[str]().union(*names)))
    if absent:
        raise RuntimeError(
            f"{', '.join(absent)} have no values: a fit that sharded them failed, and each rank kept its shards alone "
            '(OptimizerConfig(kind="distributed_parameters")), or training made them NaN throughout; load a checkpoint '
            "into a new module"
        )


def require_separable(
    optimizers: Iterable[Optimizer], config: OptimizerConfig, mesh: Mesh, *, has_master_weights: bool
) -> None:
    """Raises ConfigurationError for an optimizer whose step of one weight needs more than this rank holds, or that runs
    forward and backward itself, where it steps master weights and not the model's."""
    faults, unknown = [], []
    for optimizer in optimizers:
        name, scope = type(optimizer).__name__, update_scope_of(optimizer, config.update_scope)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # Dp+cp, and edp where there are experts.
        shards = [shard_of(parameter) for parameter in parameters]
        data_axes = {"dp+cp" if shard.data is None else shard.data.name for shard in shards}
        is_sharded = config.shards_states and any(mesh.axis(axis).size > 1 for axis in data_axes)
        is_parted = mesh.pp.size > 1 or is_sharded
        is_cut, cutting = any(shard.is_cut for shard in shards), _cutting(shards)
        if scope == "model" and (is_cut or mesh.pp.size > 1):
            faults.append(f"{name} looks at all parameters at once, and a rank holds only some of them; {_SEPARABLE}")
        elif needs_closure(optimizer) and has_master_weights:
            faults.append(
                f"{name} runs forwards within its step, and master weights reach the model after it; {_SEPARABLE}"
            )
        if config.cpu_offload and scope == "sharded parameter":
            faults.append(
                f"{name} multiplies matrices in its step, which cpu_offload would have done on the host; leave "
                "cpu_offload out, or use AdamW"
            )
        if config.cpu_offload and any(group.get("capturable") for group in optimizer.param_groups):
            faults.append(
                f"{name} has capturable=True, a step within a CUDA graph, and cpu_offload steps on the host; leave one "
                "of them out"
            )
        parts = [one for one, shard in zip(parameters, shards, strict=True) if tuple(one.shape) != shard.global_shape]
        if scope == "parameter" and parts and config.cpu_offload:
            faults.append(
                f"{name} reads whole weights, of which ranks send parts to each other, and cpu_offload holds those on "
                "the host; leave cpu_offload out, or use AdamW"
            )
        if scope == "parameter" and any(optimizer.state.get(one) for one in parts):
            faults.append(
                f"{name} reads whole weights, and has made states of the parts that a rank holds before its first "
                "step; make them in step(), as torch's optimizers do"
            )
        if scope == "unknown" and is_cut:
            faults.append(
                f"{name} is none of torch's own, and {cutting} parallelism cuts matrices, which is right only for "
                'elementwise steps; if its steps are, say OptimizerConfig(update_scope="elementwise"), if they read '
                'one weight each, whole, "parameter"'
            )
        elif scope == "unknown" and is_parted:
            unknown.append(name)
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


def _cutting(shards: Iterable[Shard]) -> str:
    """Kinds of parallelism that cut the weights, in words."""
    kinds = {"tensor" if shard.data is None else "expert" for shard in shards if shard.is_cut}
    return " and ".join(sorted(kinds, reverse=True))


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
