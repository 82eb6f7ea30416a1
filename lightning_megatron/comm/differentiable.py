"""Collectives as autograd functions, each with its conjugate as its backward.

    name                  forward                    backward                where
    copy                  identity                   all-reduce              into a column-parallel layer
    reduce                all-reduce                 identity                out of a row-parallel layer
    all_gather            all-gather                 reduce-scatter          into a layer cut over the axis
    reduce_scatter        reduce-scatter             all-gather              out of such a layer
    split                 own shard                  all-gather              into the sequence-parallel region
    all_gather_invariant  all-gather                 own shard               to a consumer that all ranks run alike
    all_to_all            all-to-all                 all-to-all, dims swapped    shards of tokens to shards of heads
    split_of_mean         own shard                  all-gather / size       split, where gradients are averaged later
    gather_of_mean        all-gather                 own shard * size        its inverse
    copy_of_mean          identity                   all-reduce / size       copy, where gradients are averaged later

What each takes and gives (replicate, invariant, partial, shard) and why these are pairs: `docs/comm.md`, algebra of
collectives. Source: Narayanan et al., arXiv 2104.04473, section 2.3 (copy, reduce); Korthikanti et al., arXiv
2205.05198, section 4.2.2 (all_gather, reduce_scatter).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis


class _Conjugates(torch.autograd.Function):
    """A map of tensors in forward, and its conjugate for gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], conjugate: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.conjugate = conjugate
        out = run(x)
        # What a Function gives must not be its input.
        return x.view_as(x) if out is x else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.conjugate(grad), None, None


def copy(x: Tensor, axis: Axis) -> Tensor:
    """Invariant to replicate: `x` itself, for ranks that each compute another part; gradients are all-reduced."""
    out: Tensor = _Conjugates.apply(x, _itself, lambda grad: collectives.all_reduce(grad, axis))
    return out


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """Partial to invariant: the sum of `x` over the axis; the gradient passes as it is."""
    out: Tensor = _Conjugates.apply(x, lambda x: collectives.all_reduce(x, axis), _itself)
    return out


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Shard to replicate: shards joined along `dim`, for ranks that each compute another part; gradients are
    reduce-scattered."""
    out: Tensor = _Conjugates.apply(
        x,
        lambda x: collectives.all_gather(x, axis, dim),
        lambda grad: collectives.reduce_scatter(grad, axis, dim),
    )
    return out


def as_gathered(x: Tensor, whole: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """`all_gather` of `x`, which is here already as `whole`; gradients are reduce-scattered."""
    out: Tensor = _Conjugates.apply(
        x, lambda x: whole.detach().view_as(whole), lambda part: collectives.reduce_scatter(part, axis, dim)
    )
    return out


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Partial to shard: this rank's part along `dim` of the sum over the axis; gradients are all-gathered."""
    out: Tensor = _Conjugates.apply(
        x,
        lambda x: collectives.reduce_scatter(x, axis, dim),
        lambda grad: collectives.all_gather(grad, axis, dim),
    )
    return out


def split(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Invariant to shard: this rank's part of `x` along `dim`; gradients are all-gathered."""
    # A copy, because a Function's view of its input takes no change in place.
    out: Tensor = _Conjugates.apply(
        x,
        lambda x: x if axis.size == 1 else collectives.shard_slice(x, axis, dim).clone(),
        lambda grad: collectives.all_gather(grad, axis, dim),
    )
    return out


def all_gather_invariant(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Shard to invariant: shards joined along `dim`, for ranks that all compute alike; each gets its part of the
    gradient, because a sum would scale it by the size of the axis."""
    out: Tensor = _Conjugates.apply(
        x,
        lambda x: collectives.all_gather(x, axis, dim),
        lambda grad: collectives.shard_slice(grad, axis, dim),
    )
    return out


def all_to_all(x: Tensor, axis: Axis, split: int, join: int) -> Tensor:
    """Shard to shard: cut along the dim `join` before and along `split` after; gradients go the other way round."""
    out: Tensor = _Conjugates.apply(
        x,
        lambda x: collectives.all_to_all(x, axis, split, join),
        lambda grad: collectives.all_to_all(grad, axis, join, split),
    )
    return out


def split_of_mean(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's part of `x` along `dim`, into a region of ranks whose gradients of weights are averaged in the end;
    weights outside of the region have all of their gradient on every rank."""
    out: Tensor = _Conjugates.apply(
        x,
        lambda x: x if axis.size == 1 else collectives.shard_slice(x, axis, dim).clone(),
        lambda grad: collectives.all_gather(grad, axis, dim) / axis.size,
    )
    return out


def gather_of_mean(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Shards joined along `dim`, out of the region of `split_of_mean`: there a mean over ranks is to be a sum."""
    out: Tensor = _Conjugates.apply(
        x,
        lambda x: collectives.all_gather(x, axis, dim),
        lambda grad: collectives.shard_slice(grad, axis, dim) * axis.size,
    )
    return out


def copy_of_mean(x: Tensor, axis: Axis) -> Tensor:
    """`x` itself, into the region of `split_of_mean`, where each rank has terms of its gradient."""
    out: Tensor = _Conjugates.apply(x, _itself, lambda grad: collectives.all_reduce(grad, axis) / axis.size)
    return out


def _itself(x: Tensor) -> Tensor:
    return x
