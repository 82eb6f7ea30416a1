"""What the tests of this room share: a mesh of threads, and slices of the plain layer's tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from lightning_megatron.comm.collectives import all_reduce
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.sharding import Shard, shard_of
from lightning_megatron.tensor.linear import ParallelLinear
from tests.harness.threads import new_group

# float64 sums of some hundred products of numbers near 1, added up in another order.
TOLERANCE = 1e-12
# A wrong answer must differ by this much at least.
BITE = 1e-3

on_every_layout = pytest.mark.parametrize(
    ("num_ranks", "is_sequence_parallel"), [(1, False), (2, False), (2, True), (4, False), (4, True)]
)


def thread_mesh(world: Any, is_sequence_parallel: bool) -> Mesh:
    """All threads on one tensor-parallel axis."""
    sizes = Sizes(world=world.size(), tp=world.size(), sequence_parallel=is_sequence_parallel)
    return Mesh.build(sizes, world.rank(), new_group)


def part_of(full: Tensor, shard: Shard) -> Tensor:
    """The slice of the plain tensor that the shard is, without padding."""
    for dim, (offset, size) in enumerate(zip(shard.box.offsets, shard.box.sizes, strict=True)):
        full = full.narrow(dim, offset, size)
    return full


def send_in_chunks(module: nn.Module, num_chunks: int) -> None:
    """Makes the linears of a module gather and scatter tokens in so many chunks."""
    for linear in module.modules():
        if isinstance(linear, ParallelLinear):
            linear.num_chunks = num_chunks


@torch.no_grad()
def fill(parameter: Tensor, full: Tensor) -> None:
    """Gives the parameter its slice of the plain one, and zeros as padding."""
    shard = shard_of(parameter)
    assert tuple(full.shape) == shard.global_shape
    shard.valid(parameter.zero_()).copy_(part_of(full, shard))


def assert_gradient_is_slice(parameter: Tensor, whole_grad: Tensor, tolerance: float = TOLERANCE) -> None:
    """The gradient, summed over the axis it is partial on, is the plain one's slice, and 0 in the padding."""
    shard = shard_of(parameter)
    grad = parameter.grad
    assert grad is not None and grad.shape == parameter.shape
    if shard.partial is not None:
        grad = all_reduce(grad, shard.partial)
    assert_close(shard.valid(grad), part_of(whole_grad, shard), rtol=0, atol=tolerance)
    assert grad.count_nonzero() == shard.valid(grad).count_nonzero()


def gradient(tensor: Tensor | nn.Parameter) -> Tensor:
    """The gradient, which must be there."""
    assert tensor.grad is not None
    return tensor.grad


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors."""
    return (a - b).abs().max().item()
