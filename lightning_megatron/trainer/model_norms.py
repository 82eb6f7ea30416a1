"""Gradients and norms of the full model on every layout, for a user's hooks and callbacks.

In a hook a rank sees the weights that it holds: those of its pipeline stage, its slices of what is cut over
tensor-parallel ranks. A norm over `module.parameters()` there is not the model's. The functions here talk over the
ranks, so every rank calls them alike. Where Lightning holds the whole model on each rank (one device, DDP) they do what
torch does.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_megatron.checkpoint.state import Slot
from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.data_parallel_comm import DataParallelComm
from lightning_megatron.optim.reductions import scale_in_place, square
from lightning_megatron.sharding import shard_of
from lightning_megatron.trainer.strategy import MegatronStrategy


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """A slice of a weight on this rank, and what is read of it: the weight or its gradient."""

    slot: Slot
    tensor: Tensor | None
    """Elements of the slot; None where there is no gradient."""
    is_counted: bool
    """Whether these elements count here, and on no other rank."""


def named_gradients(module: pl.LightningModule) -> Iterator[tuple[str, Tensor | None]]:
    """Name and gradient of each trained weight of the full model, of the shape that it has on one device.

    Each is a copy, and one at a time is in memory. Collective over the world: every rank iterates to the end. Raises
    RuntimeError outside of a fit.
    """
    slices, mesh = _gradients(module), _mesh_of(module)
    shapes = _shapes(slices, mesh)
    present = _norms(slices, list(shapes), math.inf, mesh, _device_of(module))
    for name, (shape, dtype) in shapes.items():
        if name not in present:
            yield name, None
            continue
        full = torch.zeros(shape, dtype=dtype, device=_device_of(module))
        for each in slices:
            if each.slot.name == name and each.is_counted and each.tensor is not None:
                for piece in each.slot.pieces(each.tensor):
                    piece.box.of(full).copy_(piece.tensor)
        yield name, collectives.all_reduce_(full, mesh.world)


def grad_norm(
    module: pl.LightningModule, norm_type: float | int | str = 2, group_separator: str = "/"
) -> dict[str, Tensor]:
    """Norms of the full model's gradients, float64 [], under the keys of Lightning's function of this name.

    `grad_{norm_type}_norm/{name}` for each weight with a gradient, and `grad_{norm_type}_norm_total`. The same on
    every rank; collective over the world. Raises RuntimeError outside of a fit, ValueError for a norm that is none.
    """
    return _with_total("grad", module, _gradients(module), norm_type, group_separator)


def weight_norm(
    module: pl.LightningModule, norm_type: float | int | str = 2, group_separator: str = "/"
) -> dict[str, Tensor]:
    """Norms of the full model's weights, float64 [], keys and collectives as those of `grad_norm`."""
    return _with_total("weight", module, _weights(module), norm_type, group_separator)


@torch.no_grad()
def clip_grad_norm_(module: pl.LightningModule, max_norm: float, norm_type: float | int | str = 2) -> Tensor:
    """Scales all gradients so that the norm of the full model's is at most `max_norm`; returns the norm before, [].

    As torch.nn.utils.clip_grad_norm_ over all parameters on one device. Collective over the world; raises
    RuntimeError outside of a fit.
    """
    norm = grad_norm(module, norm_type).get(f"grad_{float(norm_type)}_norm_total")
    if norm is None:
        return torch.zeros((), dtype=torch.float64, device=_device_of(module))
    own = [each.tensor for each in _gradients(module) if each.tensor is not None]
    scale_in_place(own, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    if (dp_comm := _comm_of(module)) is not None:
        dp_comm.refresh_gradients()
    return norm


def _with_total(
    prefix: str, module: pl.LightningModule, slices: list[_Slice], norm_type: float | int | str, separator: str
) -> dict[str, Tensor]:
    power = float(norm_type)
    if not power > 0:
        raise ValueError(f"norm_type ({norm_type!r}) must be a positive number or 'inf'")
    mesh = _mesh_of(module)
    norms = _norms(slices, list(_shapes(slices, mesh)), power, mesh, _device_of(module))
    found = {f"{prefix}_{power}_norm{separator}{name}": norm for name, norm in norms.items()}
    if norms:
        found[f"{prefix}_{power}_norm_total"] = torch.linalg.vector_norm(torch.stack(list(norms.values())), power)
    return found


def _norms(slices: list[_Slice], names: list[str], power: float, mesh: Mesh, device: torch.device) -> dict[str, Tensor]:
    """The norm of each of `names` that any rank has a tensor of, float64 []. Collective over the world."""
    sums = torch.zeros(len(names), dtype=torch.float64, device=device)
    present, index = torch.zeros_like(sums), {name: i for i, name in enumerate(names)}
    for each in slices:
        if each.tensor is None:
            continue
        i, x = index[each.slot.name], each.tensor.detach()
        present[i] = 1
        if each.is_counted and x.numel():
            own = square(x).sqrt() if power == 2 else torch.linalg.vector_norm(x, power, dtype=torch.float64)
            sums[i] = torch.maximum(sums[i], own) if power == math.inf else sums[i] + own**power
    both = torch.stack([sums, present])
    both = collectives.all_reduce(both, mesh.world, "max" if power == math.inf else "sum")
    norms = both[0] if power == math.inf else both[0] ** (1 / power)
    return {name: norms[i] for name, i in index.items() if both[1, i]}


def _shapes(slices: list[_Slice], mesh: Mesh) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each weight of the full model by name, on every rank. Collective over the world."""
    own = {
        each.slot.name: (
            shard_of(each.slot.parameter).global_shape,
            each.slot.parameter.dtype if each.tensor is None else each.tensor.dtype,
        )
        for each in slices
    }
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for names in collectives.gather_objects(own, mesh.world):
        found |= {name: shape for name, shape in names.items() if name not in found}
    return found


def _gradients(module: pl.LightningModule) -> list[_Slice]:
    strategy, dp_comm = module.trainer.strategy, _comm_of(module)
    if isinstance(strategy, MegatronStrategy):
        strategy.require_gradients("a norm or list of gradients")
    if dp_comm is None:
        return [
            _Slice(slot=Slot.full(name, parameter), tensor=parameter.grad, is_counted=True)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]
    dp_comm.take_gradients()
    return [each for each in _stepped(dp_comm, of=lambda tensor: tensor.grad) if each.slot.parameter.requires_grad]


def _stepped(dp_comm: DataParallelComm, of: Callable[[nn.Parameter], Tensor | None]) -> list[_Slice]:
    """What `of` makes of each tensor that optimizers may step on this rank."""
    gradients = dp_comm.gradients
    slots = {shard.tensor: (shard.range.start, shard.range.end) for shard in gradients.param_shards}
    return [
        _Slice(
            slot=Slot(param.name, param.parameter, *slots.get(tensor, (0, tensor.numel()))),
            tensor=of(tensor),
            is_counted=gradients.counts(param, is_shard=is_shard),
        )
        for param, tensor, is_shard in gradients.stepped()
    ]


def _weights(module: pl.LightningModule) -> list[_Slice]:
    strategy, dp_comm = module.trainer.strategy, _comm_of(module)
    if isinstance(strategy, MegatronStrategy):
        strategy.refuse_in_schedule("a norm of weights")
    if dp_comm is None:
        named = module.named_parameters()
        return [_Slice(slot=Slot.full(name, weight), tensor=weight, is_counted=True) for name, weight in named]
    dp_comm.gather_all()
    # The master weights, where there are some.
    return _stepped(dp_comm, of=lambda tensor: tensor)


def _comm_of(module: pl.LightningModule) -> DataParallelComm | None:
    """Communication of the fit that runs; None under a strategy of Lightning's own.

    Raises RuntimeError without a fit.
    """
    strategy = module.trainer.strategy
    return strategy.steps.dp_comm if isinstance(strategy, MegatronStrategy) else None


def _mesh_of(module: pl.LightningModule) -> Mesh:
    strategy = module.trainer.strategy
    return strategy.mesh if isinstance(strategy, MegatronStrategy) else Mesh.single()


def _device_of(module: pl.LightningModule) -> torch.device:
    return module.trainer.strategy.root_device
