"""Initial values that do not depend on the mesh: each rank draws its slice of what one device would have drawn.

The constructor of a full model calls `initialise` once its parts are built; layers are built unfilled. Parameters that
were made without values (`sharding.deferring`) learn how to draw theirs.
"""

from functools import partial

from torch import Tensor, nn

from lightning_megatron.comm import rng
from lightning_megatron.sharding import Box, Shard, fill, sharded_parameters


def initialise(module: nn.Module, seed: int, prefix: str = "") -> nn.Module:
    """Fills every sharded parameter with its initial values, which depend on seed, name and position alone.

    `prefix` goes before the names that `module` knows, so that a part of a model draws what the full model would.
    """
    for name, parameter, shard in sharded_parameters(module):
        fill_initial_(parameter, shard, seed, prefix + name)
    return module


def fill_initial_(parameter: Tensor, shard: Shard, seed: int, name: str) -> None:
    """Fills one parameter as the unsplit parameter called `name` would be, and its padding with zeros."""
    fill(parameter, partial(_draw, shard, rng.key(seed, name)))


def _draw(shard: Shard, key: int, box: Box, out: Tensor) -> None:
    """Draws a box of the unsplit parameter."""
    if shard.initial.std == 0.0:
        out.fill_(shard.initial.mean)
        return
    rng.fill_normal_(out, shard.initial.std, key, shard.global_shape, box.offsets)
    out.add_(shard.initial.mean)
