"""Whether optimizers can step what a rank holds: parts of weights, some of the weights, main weights in their place."""

import inspect
from collections.abc import Iterable

from torch.optim import Optimizer

from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.update_scope import update_scope_of
from lightning_megatron.sharding import Shard, shard_of

_SEPARABLE = (
    "use an optimizer that treats each number by itself, as SGD or AdamW do, or ranks that hold whole models and the "
    "replicated optimizer in 32-true"
)


def needs_closure(optimizer: object) -> bool:
    """Whether the optimizer's step must be given the forward and backward to run by itself."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")  # type: ignore[attr-defined]
    return closure is not None and closure.default is inspect.Parameter.empty


def separable_faults(
    optimizers: Iterable[Optimizer], config: OptimizerConfig, mesh: Mesh, *, has_master_weights: bool
) -> tuple[list[str], list[str]]:
    """Errors of optimizers whose step of one weight needs more than this rank holds, or that run forward and backward
    themselves where they step master weights; and names of those of which nobody knows."""
    faults: list[str] = []
    unknown: list[str] = []
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
    return faults, unknown


def _cutting(shards: Iterable[Shard]) -> str:
    """Kinds of parallelism that cut the weights, in words."""
    kinds = {"tensor" if shard.data is None else "expert" for shard in shards if shard.is_cut}
    return " and ".join(sorted(kinds, reverse=True))
