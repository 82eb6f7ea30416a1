"""Collectives as autograd functions, each with its conjugate as its backward.

    name                  forward                    backward                where
    copy                  identity                   all-reduce              into a column-parallel layer
    reduce                all-reduce                 identity                out of a row-parallel layer
    all_gather            all-gather                 reduce-scatter          into a layer cut over the axis
    reduce_scatter        reduce-scatter             all-gather              out of such a layer
    split                 own shard                  all-gather              into the sequence-parallel region
    all_gather_invariant  all-gather                 own shard               to a consumer that all ranks run alike
    all_to_all            all-to-all                 all-to-all, dims swapped    shards of tokens to shards of heads

What each takes and gives (replicate, invariant, partial, shard) and why these are pairs: `docs/comm.md`, algebra of
collectives. Source: Narayanan et al., arXiv 2104.04473, section 2.3 (copy, reduce); Korthikanti et al., arXiv
2205.05198, section 4.2.2 (all_gather, reduce_scatter).
"""

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.all_reduce(grad, ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return x.view_as(x) if axis.size == 1 else collectives.all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return x.view_as(x) if axis.size == 1 else collectives.all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return collectives.reduce_scatter(grad, ctx.axis, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return x.view_as(x) if axis.size == 1 else collectives.reduce_scatter(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return collectives.all_gather(grad, ctx.axis, ctx.dim), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return x.view_as(x) if axis.size == 1 else collectives.shard_slice(x, axis, dim).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return collectives.all_gather(grad, ctx.axis, ctx.dim), None, None


class _AllGatherInvariant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return x.view_as(x) if axis.size == 1 else collectives.all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return collectives.shard_slice(grad, ctx.axis, ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, split: int, join: int) -> Tensor:
        ctx.axis, ctx.split, ctx.join = axis, split, join
        return x.view_as(x) if axis.size == 1 else collectives.all_to_all(x, axis, split, join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return collectives.all_to_all(grad, ctx.axis, ctx.join, ctx.split), None, None, None


def copy(x: Tensor, axis: Axis) -> Tensor:
    """Invariant to replicate: `x` itself, for ranks that each compute another part; gradients are all-reduced."""
    out: Tensor = _Copy.apply(x, axis)
    return out


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """Partial to invariant: the sum of `x` over the axis; the gradient passes as it is."""
    out: Tensor = _Reduce.apply(x, axis)
    return out


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Shard to replicate: shards joined along `dim`, for ranks that each compute another part; gradients are
    reduce-scattered."""
    out: Tensor = _AllGather.apply(x, axis, dim)
    return out


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Partial to shard: this rank's part along `dim` of the sum over the axis; gradients are all-gathered."""
    out: Tensor = _ReduceScatter.apply(x, axis, dim)
    return out


def split(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Invariant to shard: this rank's part of `x` along `dim`; gradients are all-gathered."""
    out: Tensor = _Split.apply(x, axis, dim)
    return out


def all_gather_invariant(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Shard to invariant: shards joined along `dim`, for ranks that all compute alike; each gets its part of the
    gradient, because a sum would scale it by the size of the axis."""
    out: Tensor = _AllGatherInvariant.apply(x, axis, dim)
    return out


def all_to_all(x: Tensor, axis: Axis, split: int, join: int) -> Tensor:
    """Shard to shard: cut along the dim `join` before and along `split` after; gradients go the other way round."""
    out: Tensor = _AllToAll.apply(x, axis, split, join)
    return out
