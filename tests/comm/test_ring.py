"""Tests of the ring: a tensor arrives at the next rank, on any axis, without a rank waiting for itself."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_megatron.comm.ring import pass_on
from lightning_megatron.mesh import Axis, Mesh, Sizes
from tests.harness.ranks import run_on_ranks
from tests.harness.threads import new_group, run_on_threads
from tests.pipeline.meshes import make_mesh

SIZES = (2, 3, 4)


def check(axis: Axis) -> None:
    """Two messages in flight, and one all the way round."""
    x = torch.arange(6.0).view(2, 3) + 10 * axis.rank
    before = torch.arange(6.0).view(2, 3) + 10 * ((axis.rank - 1) % axis.size)
    one, other = pass_on(x, axis, wait=False), pass_on(-x.double(), axis, wait=False)
    assert one.wait().equal(before)
    assert one.wait() is one.output  # waiting again does nothing
    assert other.wait().equal(-before.double())
    went = x.clone()
    for _ in range(axis.size):
        went = pass_on(went, axis)
    assert went.equal(x)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_passed_on_goes_one_rank_further_on_threads(size: int) -> None:
    def on_rank(world: Any) -> None:
        check(Mesh.build(Sizes(world=size, cp=size), world.rank(), new_group).cp)

    run_on_threads(size, on_rank)


def check_on_gloo(size: int) -> None:
    check(make_mesh(Sizes(world=size, cp=size)).cp)
    # Stages run against the global ranks; the ring runs along the axis.
    pp = make_mesh(Sizes(world=size, pp=size)).pp
    assert pp.rank == size - 1 - dist.get_rank()
    check(pp)


def test_what_is_passed_on_goes_one_rank_further_on_real_ranks() -> None:
    run_on_ranks(3, check_on_gloo, 3)


def test_a_ring_of_one_gives_the_tensor_itself_and_sends_nothing() -> None:
    x, axis = torch.ones(2), Mesh.single().cp
    assert pass_on(x, axis) is x
    assert pass_on(x, axis, wait=False).wait() is x
