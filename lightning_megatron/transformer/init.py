"""Initial values that do not depend on the mesh: each rank draws its slice of what one device would have drawn.

The constructor of a full model calls `initialise` once its parts are built; layers are built unfilled.
"""

import torch
from torch import Tensor, nn

from lightning_megatron.comm import rng
from lightning_megatron.sharding import Shard, sharded_parameters


@torch.no_grad()
def initialise(module: nn.Module, seed: int, prefix: str = "") -> nn.Module:
    """Fills every sharded parameter with its initial values, which depend on seed, name and position alone.

    `prefix` goes before the names that `module` knows, so that a part of a model draws what the full model would.
    """
    for name, parameter, shard in sharded_parameters(module):
        fill_initial_(parameter, shard, seed, prefix + name)
    return module


@torch.no_grad()
def fill_initial_(parameter: Tensor, shard: Shard, seed: int, name: str) -> None:
    """Fills one parameter as the unsplit parameter called `name` would be, and its padding with zeros."""
    if shard.initial.std == 0.0:
        parameter.fill_(shard.initial.mean)
    elif not parameter.is_meta:
        valid = shard.valid(parameter)
        rng.fill_normal_(valid, shard.initial.std, rng.key(seed, name), shard.global_shape, shard.box.offsets)
        valid.add_(shard.initial.mean)
    if shard.dim is not None:
        length = shard.valid(parameter).shape[shard.dim]
        parameter.narrow(shard.dim, length, parameter.shape[shard.dim] - length).zero_()
