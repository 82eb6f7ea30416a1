"""A model with every kind of cut, on any mesh: its parts, its true values, and the steps that an optimizer takes.

Gradients are slices of fixed global ones, so an elementwise optimizer gives the same bits on every mesh.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.sharding import Initial, shard_of, shard_parameter

SHAPES = {
    "embedding.weight": (131, 6),
    "layers.0.gate_up.weight": (2, 10, 6),
    "layers.0.norm.weight": (6,),
    "layers.0.few.bias": (3,),  # the last of four ranks holds padding alone
    "layers.1.gate_up.weight": (2, 10, 6),
    "layers.1.norm.weight": (6,),
    "head.weight": (131, 6),
    "scale": (),
}
CUT_DIM = {
    "embedding.weight": 0,
    "layers.0.gate_up.weight": 1,
    "layers.0.few.bias": 0,
    "layers.1.gate_up.weight": 1,
    "head.weight": 0,
}
# Stage of each name with two stages; the scale is replicated on both.
STAGE = {"embedding": 0, "layers.0": 0, "layers.1": 1, "head": 1}

MakeOptimizer = Callable[[dict[str, nn.Parameter]], Optimizer]


def mesh_of(sizes: Sizes) -> Mesh:
    """The mesh of this process, with groups where it has peers."""
    if sizes.world == 1:
        return Mesh.single()
    return Mesh.build(sizes, dist.get_rank(), lambda ranks: dist.new_group(list(ranks), use_local_synchronization=True))


def true_value(name: str, of: str = "value") -> Tensor:
    """The unsplit tensor that belongs to the name."""
    generator = torch.Generator().manual_seed(sum(map(ord, name + of)))
    return torch.randn(SHAPES[name], generator=generator)


def names_of(mesh: Mesh) -> list[str]:
    """What this rank's stage has, in the order of the unsplit model."""
    if mesh.pp.size == 1:
        return list(SHAPES)
    stages = {name: next((stage for start, stage in STAGE.items() if name.startswith(start)), None) for name in SHAPES}
    return [name for name, stage in stages.items() if stage in (None, mesh.pp.rank)]


def parameters_of(mesh: Mesh, fill: bool) -> dict[str, nn.Parameter]:
    """This rank's parameters by name: true values, or numbers that are wrong everywhere. Padding is zero."""
    parameters = {}
    for name in names_of(mesh):
        dim = CUT_DIM.get(name)
        axis: Axis | None = None if dim is None else mesh.tp
        replicas = (mesh.tp,) if dim is None else ()
        parameter = shard_parameter(SHAPES[name], initial=Initial(), dim=dim, axis=axis, replicas=replicas)
        with torch.no_grad():
            parameter.zero_()
            shard_of(parameter).valid(parameter).copy_(slice_of(parameter, true_value(name)) if fill else -7.0)
        parameters[name] = parameter
    return parameters


def slice_of(parameter: Tensor, full: Tensor) -> Tensor:
    """The part of an unsplit tensor that the parameter's rank holds."""
    box = shard_of(parameter).box
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        full = full.narrow(dim, offset, size)
    return full


def train(parameters: dict[str, nn.Parameter], optimizer: Optimizer, steps: range) -> None:
    """Some steps, each with its own gradients; layers.0.norm.weight never gets one."""
    for step in steps:
        for name, parameter in parameters.items():
            if name != "layers.0.norm.weight":
                parameter.grad = torch.zeros_like(parameter)
                gradient = true_value(name, f"gradient {step}")
                shard_of(parameter).valid(parameter.grad).copy_(slice_of(parameter, gradient))
        optimizer.step()


def adamw(parameters: dict[str, nn.Parameter]) -> Optimizer:
    """AdamW with a group without weight decay, as language models are trained."""
    plain = [parameter for name, parameter in parameters.items() if "norm" in name or name == "scale"]
    decayed = [parameter for name, parameter in parameters.items() if "norm" not in name and name != "scale"]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9))


def sgd(parameters: dict[str, nn.Parameter]) -> Optimizer:
    """SGD with momentum, one group."""
    return torch.optim.SGD(list(parameters.values()), lr=0.1, momentum=0.9, nesterov=True)


OPTIMIZERS: dict[str, MakeOptimizer] = {"adamw": adamw, "sgd": sgd}
