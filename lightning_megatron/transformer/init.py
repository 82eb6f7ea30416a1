"""Initial values that do not depend on the mesh: each rank draws its slice of what one device would have drawn.

The constructor of a full model calls `initialise` once its parts are built; layers are built unfilled. Before a fit
that cuts parameters over data-parallel ranks they stay without memory (`drawn_later`), and each rank draws its shard.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor, nn

from lightning_megatron.comm import rng
from lightning_megatron.sharding import Box, Shard, sharded_parameters, without_memory, write_later

_IS_LATER: ContextVar[bool] = ContextVar("lightning_megatron_drawn_later", default=False)


@contextmanager
def drawn_later() -> Iterator[None]:
    """Inside the block full models are made without values, which their parameters get with their memory."""
    token = _IS_LATER.set(True)
    try:
        yield
    finally:
        _IS_LATER.reset(token)


def is_drawn_later() -> bool:
    """Whether full models are made without values. Only what makes full models reads it."""
    return _IS_LATER.get()


def unfilled() -> AbstractContextManager[None]:
    """The block in which a full model builds its parts, which `initialise` then fills, or says how to fill."""
    return without_memory() if is_drawn_later() else nullcontext()


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
    if parameter.is_meta:
        if is_drawn_later():
            write_later(parameter, partial(_draw, shard, rng.key(seed, name)))
        return
    _draw(shard, rng.key(seed, name), shard.box, shard.valid(parameter))
    if shard.dim is not None:
        length = shard.valid(parameter).shape[shard.dim]
        parameter.narrow(shard.dim, length, parameter.shape[shard.dim] - length).zero_()


def _draw(shard: Shard, key: int, box: Box, out: Tensor) -> None:
    """Draws a box of the unsplit parameter."""
    if shard.initial.std == 0.0:
        out.fill_(shard.initial.mean)
        return
    rng.fill_normal_(out, shard.initial.std, key, shard.global_shape, box.offsets)
    out.add_(shard.initial.mean)
