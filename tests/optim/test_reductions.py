"""Squares and extremes are those of all numbers, scaling keeps dtypes, shared names find the ranks that hold them."""

import math

import pytest
import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Sizes
from lightning_megatron.optim.reductions import extremes, scale_in_place, square, stage_axes
from tests.harness.ranks import run_on_ranks
from tests.optim.test_gradients import group
from tests.pipeline.meshes import make_mesh

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (256,), (3, 512), (5, 77)])
def test_the_square_is_the_sum_of_all_squares(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random(*shape).to(dtype)
    found = square(x)
    assert found.dtype == torch.float64 and found.shape == ()
    assert found.item() == pytest.approx(x.double().square().sum().item(), rel=1e-6)


def test_the_square_of_numbers_whose_squares_overflow_is_finite() -> None:
    x = torch.full((512,), 300.0, dtype=torch.float16)
    assert x.square().isinf().all() and square(x).item() == 512 * 300.0**2


def test_the_square_does_not_depend_on_strides() -> None:
    x = random(32, 64).float()
    assert square(x.T).item() == pytest.approx(square(x).item(), rel=1e-6)


def test_of_a_sparse_gradient_an_element_given_twice_counts_as_its_sum() -> None:
    indices, values = torch.tensor([[1, 1, 3]]), torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, -5.0]])
    x = torch.sparse_coo_tensor(indices, values, (4, 2), check_invariants=True)
    assert square(x).item() == 9 + 25
    assert extremes(x).tolist() == [-5, 3]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_extremes_are_finite_only_if_all_numbers_are(bad: float, dtype: torch.dtype) -> None:
    x = random(31, 33).to(dtype)
    largest = torch.finfo(dtype).max
    x[0, 0], x[30, 32] = largest, -largest
    assert extremes(x).tolist() == [-largest, largest]
    for place in ((0, 1), (17, 5), (30, 31)):
        y = x.clone()
        y[place] = bad
        assert not extremes(y).isfinite().all()


def test_the_extremes_of_nothing_are_finite() -> None:
    assert extremes(torch.zeros(0)).tolist() == [0, 0]


def test_scaling_keeps_each_dtype() -> None:
    tensors = [torch.ones(2, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    scale_in_place(tensors, torch.tensor(0.5, dtype=torch.float64))
    assert [t.dtype for t in tensors] == [torch.float32, torch.float64, torch.bfloat16]
    assert all(t.tolist() == [0.5, 0.5] for t in tensors)


def axes_of_stages() -> dict[str, tuple[int, ...]]:
    mesh = make_mesh(Sizes(world=4, pp=4))
    held = {0: ["a", "everywhere", "ends"], 1: ["b", "everywhere"], 2: ["c", "everywhere"], 3: ["everywhere", "ends"]}
    axes = stage_axes([held[rank] for rank in range(4)], mesh, group)
    found = {}
    for name, axis in sorted(axes.items()):
        total = torch.tensor([10.0**mesh.pp.rank])
        collectives.all_reduce_(total, axis)
        found[name] = (*axis.ranks, int(total.item()))
    return found


def test_a_name_on_several_stages_gets_an_axis_of_those_stages() -> None:
    by_rank = run_on_ranks(4, axes_of_stages)
    # Stage s is on rank 3 - s.
    assert all(found["everywhere"] == (3, 2, 1, 0, 1111) for found in by_rank)
    assert by_rank[3]["ends"] == by_rank[0]["ends"] == (3, 0, 1001)
    assert all(found.keys() == {"everywhere"} for found in by_rank[1:3])
