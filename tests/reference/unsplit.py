"""The unsplit weights and gradients of a split model, whole on every rank of tp."""

import torch
from torch import Tensor, nn

from lightning_megatron.comm import collectives
from lightning_megatron.sharding import Shard, sharded_parameters


def unsplit_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter as the unsplit model has it, by name, detached."""
    return {name: whole(parameter.detach(), shard) for name, parameter, shard in sharded_parameters(model)}


def unsplit_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient as the unsplit model has it; partial sums are summed, a missing one is zero."""
    gradients = {}
    for name, parameter, shard in sharded_parameters(model):
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        if shard.partial is not None:
            grad = collectives.all_reduce(grad, shard.partial)
        gradients[name] = whole(grad, shard)
    return gradients


def whole(local: Tensor, shard: Shard) -> Tensor:
    """The slices of all ranks joined, padding cut off."""
    joined = local.contiguous()
    if shard.dim is not None and shard.axis is not None:
        joined = collectives.all_gather(joined, shard.axis, shard.dim)
        joined = joined.narrow(shard.dim, 0, shard.global_shape[shard.dim])
    if shard.leading is not None:
        joined = collectives.all_gather(joined.contiguous(), shard.leading)
    return joined.clone()
