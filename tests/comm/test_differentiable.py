"""Tests of the conjugate pairs: what comes back is the gradient of what was meant, on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightning_megatron.comm import differentiable
from lightning_megatron.comm.collectives import shard_slice
from lightning_megatron.mesh import Axis, Mesh, Sizes
from tests.harness.threads import new_group, run_on_threads

SHAPE = (8, 4)
TOLERANCE = 1e-12


def on_axis(size: int, fn: Callable[[Axis], Any]) -> list[Any]:
    """What `fn(axis)` gives on each rank of an axis of that size."""
    return run_on_threads(size, lambda world: fn(Mesh.build(Sizes(world=size, tp=size), world.rank(), new_group).tp))


def back(out: Tensor, x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of `x` for that of `out`."""
    (result,) = torch.autograd.grad(out, x, grad)
    return result


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def full_and_parts(size: int, dim: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A tensor, its equal parts, and a different tensor of the full shape for each rank."""
    full = random(*SHAPE)
    return full, list(full.chunk(size, dim)), [random(*SHAPE) for _ in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_copy_sums_the_gradients(size: int) -> None:
    x, grads = random(*SHAPE), [random(*SHAPE) for _ in range(size)]

    def on_rank(axis: Axis) -> None:
        own = x.clone().requires_grad_()
        out = differentiable.copy(own, axis)
        assert out.equal(x)
        assert_close(back(out, own, grads[axis.rank]), sum(grads), rtol=0, atol=TOLERANCE)

    on_axis(size, on_rank)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_reduce_sums_and_hands_the_gradient_on_unscaled(size: int) -> None:
    parts, grad = [random(*SHAPE) for _ in range(size)], random(*SHAPE)

    def on_rank(axis: Axis) -> None:
        own = parts[axis.rank].clone().requires_grad_()
        out = differentiable.reduce(own, axis)
        assert_close(out, sum(parts), rtol=0, atol=TOLERANCE)
        assert back(out, own, grad).equal(grad)
        assert own.detach().equal(parts[axis.rank])

    on_axis(size, on_rank)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_joins_and_gives_each_shard_its_part_of_the_summed_gradient(size: int, dim: int) -> None:
    full, parts, grads = full_and_parts(size, dim)

    def on_rank(axis: Axis) -> None:
        own = parts[axis.rank].clone().requires_grad_()
        out = differentiable.all_gather(own, axis, dim)
        assert out.equal(full)
        wanted = shard_slice(torch.stack(grads).sum(0), axis, dim)
        assert_close(back(out, own, grads[axis.rank]), wanted, rtol=0, atol=TOLERANCE)
        # The same of what is gathered already.
        again = differentiable.as_gathered(own, full, axis, dim)
        assert again.equal(full) and back(again, own, grads[axis.rank]).equal(back(out, own, grads[axis.rank]))

    on_axis(size, on_rank)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_invariant_gives_each_shard_its_part_of_a_gradient_that_all_ranks_share(size: int, dim: int) -> None:
    full, parts, _ = full_and_parts(size, dim)
    grad = random(*SHAPE)

    def on_rank(axis: Axis) -> None:
        own = parts[axis.rank].clone().requires_grad_()
        out = differentiable.all_gather_invariant(own, axis, dim)
        assert out.equal(full)
        wanted = shard_slice(grad, axis, dim)
        assert back(out, own, grad).equal(wanted)
        if axis.size > 1:  # the wrong one of the two scales the gradient by the axis
            summed = back(differentiable.all_gather(own, axis, dim), own, grad)
            assert_close(summed, axis.size * wanted, rtol=TOLERANCE, atol=TOLERANCE)
            assert (summed - wanted).abs().max() > 1e-3

    on_axis(size, on_rank)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_reduce_scatter_sums_and_joins_the_gradients(size: int, dim: int) -> None:
    grad, grads, parts = full_and_parts(size, dim)

    def on_rank(axis: Axis) -> None:
        own = parts[axis.rank].clone().requires_grad_()
        out = differentiable.reduce_scatter(own, axis, dim)
        assert_close(out, shard_slice(torch.stack(parts).sum(0), axis, dim), rtol=0, atol=TOLERANCE)
        assert back(out, own, grads[axis.rank]).equal(grad)

    on_axis(size, on_rank)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_split_takes_the_own_part_and_joins_the_gradients(size: int, dim: int) -> None:
    grad, grads, _ = full_and_parts(size, dim)
    x = random(*SHAPE)

    def on_rank(axis: Axis) -> None:
        own = x.clone().requires_grad_()
        out = differentiable.split(own, axis, dim)
        assert out.equal(shard_slice(x, axis, dim))
        assert back(out, own, grads[axis.rank]).equal(grad)
        assert axis.size == 1 or out.untyped_storage().data_ptr() != own.untyped_storage().data_ptr()

    on_axis(size, on_rank)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("split", "join"), [(0, 1), (1, 0), (0, 0), (-1, 0)])
def test_all_to_all_splits_one_dim_and_joins_another_and_its_gradient_goes_back_likewise(
    size: int, split: int, join: int
) -> None:
    parts, grads = [random(8, 4) for _ in range(size)], [random(8, 4) for _ in range(size)]

    def exchanged(of_ranks: list[Tensor], rank: int, split: int, join: int) -> Tensor:
        return torch.cat([each.chunk(size, split)[rank] for each in of_ranks], join)

    def on_rank(axis: Axis) -> None:
        own = parts[axis.rank].clone().requires_grad_()
        out = differentiable.all_to_all(own, axis, split, join)
        assert out.equal(exchanged(parts, axis.rank, split, join))
        wanted_grads = [exchanged(grads, rank, split, join) for rank in range(size)]
        wanted = exchanged(wanted_grads, axis.rank, join, split)
        assert back(out, own, wanted_grads[axis.rank]).equal(wanted)
        assert wanted.equal(grads[axis.rank])  # there and back again

    on_axis(size, on_rank)


def test_a_sharded_network_has_the_gradients_of_the_unsharded_one() -> None:
    x, up, down = random(*SHAPE), random(4, 12), random(12, 4)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, up, down)]
    torch.tanh(torch.tanh(leaves[0]) @ leaves[1]).matmul(leaves[2]).square().sum().backward()
    wanted = [leaf.grad for leaf in leaves]

    def on_rank(axis: Axis, is_cut: bool) -> None:
        own_x, own_up, own_down = (
            shard_slice(x, axis).clone() if is_cut else x.clone(),
            shard_slice(up, axis, 1).clone(),
            shard_slice(down, axis).clone(),
        )
        for tensor in (own_x, own_up, own_down):
            tensor.requires_grad_()
        start, end = (
            (differentiable.all_gather, differentiable.reduce_scatter)
            if is_cut
            else (differentiable.copy, differentiable.reduce)
        )
        inner = torch.tanh(start(torch.tanh(own_x), axis) @ own_up)
        end(inner @ own_down, axis).square().sum().backward()
        parts = [shard_slice(wanted[0], axis) if is_cut else wanted[0]]
        parts += [shard_slice(wanted[1], axis, 1), shard_slice(wanted[2], axis)]
        for tensor, part in zip((own_x, own_up, own_down), parts, strict=True):
            assert_close(tensor.grad, part, rtol=1e-12, atol=1e-11)
        assert (torch.tanh(own_x.detach()) - own_x.detach()).abs().max() > 1e-3

    for is_cut in (False, True):
        on_axis(2, lambda axis, is_cut=is_cut: on_rank(axis, is_cut))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_region_of_own_shards_has_the_gradients_of_one_device_on_the_average(size: int) -> None:
    full, weight = random(*SHAPE), random(SHAPE[1])

    def loss_of(x: Tensor, inner: Tensor, axis: Axis) -> Tensor:
        own = differentiable.split_of_mean(x, axis, 0)
        return differentiable.gather_of_mean((own * inner).sin(), axis, 0).pow(2).sum()

    def gradients(axis: Axis) -> list[Tensor]:
        leaves = [full.clone().requires_grad_(), weight.clone().requires_grad_()]
        return list(torch.autograd.grad(loss_of(*leaves, axis), leaves))

    [wanted] = on_axis(1, gradients)
    found = on_axis(size, gradients)
    # Outside of the region every rank has all of it, and inside only the average has.
    assert_close(found[0][0], wanted[0], rtol=0, atol=TOLERANCE)
    assert_close(sum(one[1] for one in found) / size, wanted[1], rtol=0, atol=TOLERANCE)
    if size > 1:
        assert (found[0][1] - wanted[1]).abs().max() > 0.01
