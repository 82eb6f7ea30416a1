"""The conjugate pairs of collectives as autograd functions.

    name             forward                       backward                      where
    copy             identity                      sum over the axis             into a column-parallel layer
    reduce           sum over the axis             identity                      out of a row-parallel layer
    gather           join shards                   own part of the summed grad   into a layer cut over the axis
    reduce_scatter   own part of the sum           join shards                   out of such a layer
    split            own part                      join shards                   into the sequence-parallel region
    join             join shards                   own part                      back to a replicated consumer
    all_to_all       split one dim, join another   the other way round           tokens of some heads for heads of all

`gather` and `join` differ in what reads the result: ranks that each use it for their own part (gradients are parts of a
sum) or ranks that all do the same with it (gradients are equal; summing them would scale by the axis).
Source: Narayanan et al., arXiv 2104.04473, section 2.3 (copy, reduce); Korthikanti et al., arXiv 2205.05198, section
4.2.2 (gather, reduce_scatter).
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


class _Gather(torch.autograd.Function):
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


class _Join(torch.autograd.Function):
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
    """`x` itself; its gradient is summed over the axis."""
    out: Tensor = _Copy.apply(x, axis)
    return out


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum of `x` over the axis; each rank's `x` gets the gradient as it is."""
    out: Tensor = _Reduce.apply(x, axis)
    return out


def gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Shards joined along `dim`, for consumers that each do a part; gradients are summed and scattered."""
    out: Tensor = _Gather.apply(x, axis, dim)
    return out


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's part along `dim` of the sum over the axis; gradients are joined."""
    out: Tensor = _ReduceScatter.apply(x, axis, dim)
    return out


def split(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's part along `dim` of an `x` that all ranks share; gradients are joined."""
    out: Tensor = _Split.apply(x, axis, dim)
    return out


def join(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Shards joined along `dim`, for consumers that all do the same; each shard gets its part of the gradient."""
    out: Tensor = _Join.apply(x, axis, dim)
    return out


def all_to_all(x: Tensor, axis: Axis, split: int, join: int) -> Tensor:
    """This rank's part along `split` of what every rank has, joined along `join`; gradients go back the same way."""
    out: Tensor = _AllToAll.apply(x, axis, split, join)
    return out
