"""Weights that a module's own code has cut as DTensors, as `parallelize_module` of torch does.

Everything that handles weights (gradients, their norm, optimizers, checkpoints) has ordinary parameters of this rank's
slices, each with its `Shard`. Code that reads a weight of its module gets a DTensor of the slice, whose gradient comes
back as that of the slice: what ranks have terms of, as of a norm's weight on their own tokens, torch sums in each
backward.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import Placement

from lightning_megatron.any_module.tensor_styles import TakenParameter
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.sharding import Shard


class DTensorWeight(TakenParameter):
    """This rank's slice of a weight that the module's own code cut as a DTensor."""

    device_mesh: DeviceMesh
    placement: Placement

    def __deepcopy__(self, memo: dict[int, Any]) -> "DTensorWeight":
        copied: DTensorWeight = super().__deepcopy__(memo)  # type: ignore[assignment]
        copied.device_mesh, copied.placement = self.device_mesh, self.placement
        return copied

    def read(self) -> DTensor:
        """The whole weight as a DTensor, over the memory of the slice."""
        return DTensor.from_local(self, self.device_mesh, [self.placement], run_check=False)


def take_dtensors(module: nn.Module, tp: Axis) -> bool:
    """Makes every weight of a module that is a DTensor a `DTensorWeight`; returns whether there was one."""
    taken: dict[Tensor, DTensorWeight] = {}
    for child in module.modules():
        names = tuple(name for name, weight in child._parameters.items() if isinstance(weight, DTensor))
        for name in names:
            weight: Any = child._parameters[name]
            # One weight of two modules stays one.
            if weight not in taken:
                taken[weight] = _slice_of(weight, tp)
            child._parameters[name] = taken[weight]
        if names:
            kind: Any = type(child)
            child.__class__ = _reading(kind, names)
    return bool(taken)


def dtensor_faults(module: nn.Module, mesh: Mesh) -> list[str]:
    """Errors of weights and buffers of a module that are DTensors and cannot be taken, one sentence each."""
    named = [*module.named_parameters(), *module.named_buffers()]
    found = [(name, tensor) for name, tensor in named if isinstance(tensor, DTensor)]
    sizes, names_by_fault = mesh.sizes, dict[str, list[str]]()
    settings = {
        "pipeline_model_parallel_size": sizes.pp,
        "context_parallel_size": sizes.cp,
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": sizes.etp,
    }
    others = [f"{name} ({size})" for name, size in settings.items() if size > 1]
    others += ["sequence_parallel (True)"] if sizes.sequence_parallel else []
    for name, tensor in found:
        if fault := _unfit_beside(others) or _misplaced(tensor, mesh.tp):
            names_by_fault.setdefault(fault, []).append(name)
    return [
        f"{names[0]}{f' (and {len(names) - 1} more)' if len(names) > 1 else ''} of {type(module).__name__} is a "
        f"DTensor {fault}"
        for fault, names in names_by_fault.items()
    ]


def _unfit_beside(settings: Sequence[str]) -> str:
    """Why no DTensor trains beside these settings; empty where there are none."""
    if not settings:
        return ""
    return (
        f"beside {', '.join(settings)}, and one trains over ranks of tensor and data parallelism alone; leave that out "
        "(torch's SequenceParallel() cuts tokens beside DTensors), or have the strategy cut the linears, by "
        "ModelPlan(styles=...)"
    )


def _misplaced(tensor: Any, tp: Axis) -> str:
    """Why a DTensor is none that a rank of `tp` can take; empty where it is one."""
    ranks = tensor.device_mesh.mesh.tolist()
    if ranks != list(tp.ranks):
        return (
            f'over the ranks {ranks}, and weights are cut over those of self.device_mesh["tensor_parallel"], '
            f"{list(tp.ranks)}, alone; what fully_shard does over data-parallel ranks, "
            'MegatronStrategy(optimizer=OptimizerConfig(kind="distributed")) does'
        )
    [placement] = tensor.placements
    if not isinstance(tensor, nn.Parameter):
        return "and a buffer; buffers are whole on every rank: give styles to the modules whose weights are cut, alone"
    if type(placement) not in (ShardPlacement, Replicate):
        return f"placed as {placement}; it may be Shard(dim) or Replicate()"
    if placement.is_shard() and tensor.shape[placement.dim] % tp.size:
        return (
            f"of the shape {list(tensor.shape)}, whose dim {placement.dim} must be a multiple of "
            f"tensor_model_parallel_size ({tp.size}); pad it, or leave its module out of the parallelize_plan"
        )
    return ""


def _slice_of(weight: Any, tp: Axis) -> DTensorWeight:
    """The slice of a DTensor that this rank holds, in memory of its own."""
    [placement], local = weight.placements, weight.to_local().detach()
    held = DTensorWeight(local.clone(memory_format=torch.contiguous_format), requires_grad=weight.requires_grad)
    held.device_mesh, held.placement = weight.device_mesh, placement
    shape = tuple(weight.shape)
    if placement.is_replicate():
        held.shard = Shard(global_shape=shape, replicas=(tp,))
    else:
        dim = placement.dim % len(shape)
        held.shard = Shard(global_shape=shape, dim=dim, axis=tp, local_length=local.shape[dim])
    return held


@cache
def _reading(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass, with the name of `kind`, that reads weights of these names as DTensors."""
    body: dict[str, Any] = {name: property(partial(_read, name)) for name in names}
    body |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), body)


def _read(name: str, module: nn.Module) -> Tensor | None:
    weight = module._parameters[name]
    # Whoever put another weight in its place reads that.
    return weight.read() if isinstance(weight, DTensorWeight) else weight
