"""Tests of experts and their products: the kernel equals the loop, gradients go where they shall, slices fit."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.moe import grouped_gemm
from lightning_megatron.moe.experts import DispatchedTokens, ExpertAxes, Experts
from lightning_megatron.moe.grouped_gemm import GROUPED_GEMM, SEQUENTIAL_GEMM, ExpertGemm, ExpertGroups, grouped_linear
from lightning_megatron.sharding import Initial, shard_of
from lightning_megatron.tensor.weight_gradients import Task, WeightGradients, share
from lightning_megatron.transformer.init import initialise
from tests.moe.plain import BITE

SIZES = (3, 0, 5, 0)
GROUPS = ExpertGroups.known(SIZES, torch.tensor(SIZES))
either = pytest.mark.parametrize("gemm", [SEQUENTIAL_GEMM, GROUPED_GEMM])


def experts_on(mesh: Mesh, **changes: Any) -> Experts:
    given: dict[str, Any] = {"activation": "gelu", "initial": Initial(std=0.3), "output_initial": Initial(std=0.2)}
    return Experts(4, 8, 16, **({"axes": ExpertAxes.of(mesh)} | given | changes))


def looped(x: Tensor, weight: Tensor) -> Tensor:
    parts = [rows @ each.flatten(0, -2).t() for rows, each in zip(x.split(SIZES), weight, strict=True)]
    return torch.cat(parts).view(len(x), *weight.shape[1:-1])


@either
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # Sums of 8 or 16 products of numbers near 1, each rounded to the dtype once.
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.2), (torch.float16, 0.02)],
)
@pytest.mark.parametrize("out_shape", [(16,), (2, 8), (5,)])
def test_products_of_many_experts_equal_a_loop_in_plain_torch(
    gemm: ExpertGemm, dtype: torch.dtype, tolerance: float, out_shape: tuple[int, ...]
) -> None:
    x = torch.randn(sum(SIZES), 8).to(dtype).requires_grad_()
    weight = torch.randn(len(SIZES), *out_shape, 8).to(dtype).requires_grad_()
    y = grouped_linear(x, weight, GROUPS, gradients=WeightGradients(), gemm=gemm)
    expected = looped(x, weight)
    y_grad = torch.randn_like(y)
    torch.testing.assert_close(y, expected, rtol=0, atol=tolerance)
    # An expanded gradient, as that of a sum is, is no plain tensor in memory.
    for grad in (y_grad, torch.ones((), dtype=dtype).expand_as(y)):
        ours, theirs = (torch.autograd.grad(out, (x, weight), grad, retain_graph=True) for out in (y, expected))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
        assert ours[1][1].count_nonzero() == 0 == ours[1][3].count_nonzero()


def test_the_kernel_is_used_where_it_takes_the_tensors_and_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.dtype] = []
    kernel = torch.nn.functional.grouped_mm

    def recording(x: Tensor, *rest: Any, **options: Any) -> Tensor:
        used.append(x.dtype)
        return kernel(x, *rest, **options)

    monkeypatch.setattr(grouped_gemm.F, "grouped_mm", recording)
    for dtype, in_features, rows, is_kernel in [
        (torch.float32, 8, 8, True),
        (torch.bfloat16, 8, 8, True),
        (torch.float64, 8, 8, False),
        (torch.bfloat16, 4, 8, False),
        (torch.float32, 8, 0, False),
    ]:
        used.clear()
        sizes = SIZES if rows else (0,) * len(SIZES)
        x = torch.randn(rows, in_features).to(dtype).requires_grad_()
        weight = torch.randn(len(SIZES), 8, in_features).to(dtype).requires_grad_()
        groups = ExpertGroups.known(sizes, torch.tensor(sizes))
        grouped_linear(x, weight, groups, gradients=WeightGradients(), gemm=GROUPED_GEMM).square().sum().backward()
        assert used == ([dtype] * 3 if is_kernel else [])
        assert weight.grad is not None and weight.grad.shape == weight.shape


def test_what_the_kernel_leaves_undefined_of_an_expert_without_rows_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = torch.nn.functional.grouped_mm

    def leaving(*given: Tensor, **options: Any) -> Tensor:
        product = kernel(*given, **options)
        if product.dim() == 3:
            product[[expert for expert, size in enumerate(SIZES) if not size]] = torch.nan
        return product

    x, weight = torch.randn(sum(SIZES), 8), torch.randn(len(SIZES), 16, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(looped(x, weight).square().sum(), weight)
    monkeypatch.setattr(grouped_gemm.F, "grouped_mm", leaving)
    monkeypatch.setattr(grouped_gemm, "_leaves_undefined", lambda device: True)
    y = grouped_linear(x, weight, GROUPS, gradients=WeightGradients(), gemm=GROUPED_GEMM)
    (grad,) = torch.autograd.grad(y.square().sum(), weight)
    torch.testing.assert_close(grad, expected)


@either
@pytest.mark.parametrize("is_queued", [False, True])
@pytest.mark.parametrize("has_grad_view", [False, True])
def test_weight_gradients_go_past_autograd_where_a_schedule_says_so(
    gemm: ExpertGemm, is_queued: bool, has_grad_view: bool
) -> None:
    experts = experts_on(Mesh.single(), gemm=gemm)
    initialise(experts, seed=0)
    arrived = DispatchedTokens(torch.randn(sum(SIZES), 8), torch.rand(sum(SIZES)), GROUPS)
    for _ in range(2):
        experts(arrived).square().sum().backward()
    expected = [parameter.grad for parameter in experts.parameters()]
    experts.zero_grad()
    grad_views = {parameter: torch.full_like(parameter, 7.0) for parameter in experts.parameters()}
    gradients = WeightGradients((lambda weight: grad_views[weight]) if has_grad_view else (lambda weight: None))
    share(experts, gradients)
    queue: list[Task] = []
    for _ in range(2):
        out = experts(arrived).square().sum()
        with gradients.opened(queue if is_queued else None):
            out.backward()
    assert len(queue) == (4 if is_queued else 0)
    if is_queued:
        assert all(parameter.grad is None for parameter in experts.parameters())
    for _, task in queue:
        task()
    for parameter, grad in zip(experts.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
        assert (parameter.grad is grad_views[parameter]) == has_grad_view


@either
def test_a_deferred_weight_gradient_holds_its_operands_and_not_what_they_came_from(gemm: ExpertGemm) -> None:
    received = torch.randn(sum(SIZES), 8, requires_grad=True)
    weight, gradients = nn.Parameter(torch.randn(len(SIZES), 16, 8)), WeightGradients()
    queue: list[Task] = []
    out = grouped_linear(received.tanh(), weight, GROUPS, gradients=gradients, gemm=gemm).square().sum()
    with gradients.opened(queue):
        out.backward()
    assert len(queue) == 1
    held = weakref.ref(received)
    del received, out
    assert held() is None


@either
@pytest.mark.parametrize("is_strided", [False, True])
def test_weight_gradients_are_added_to_wider_and_to_strided_ones(gemm: ExpertGemm, is_strided: bool) -> None:
    x = torch.randn(sum(SIZES), 8).to(torch.float32 if is_strided else torch.bfloat16)
    weight, gradients = nn.Parameter(torch.randn(len(SIZES), 2, 6, 8)), WeightGradients()
    out = grouped_linear(x, weight, GROUPS, gradients=gradients, gemm=gemm).square().sum()
    (expected,) = torch.autograd.grad(out, weight, retain_graph=True)
    weight.grad = torch.ones(len(SIZES), 6, 2, 8).transpose(1, 2) if is_strided else torch.ones_like(weight)
    with gradients.opened():
        out.backward()
    torch.testing.assert_close(weight.grad, expected + 1)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_each_rank_draws_its_slice_of_the_experts_of_one_device(activation: Any) -> None:
    full = experts_on(Mesh.single(), activation=activation)
    initialise(full, seed=3)
    counts = {name: torch.zeros_like(parameter) for name, parameter in full.named_parameters()}
    for rank in range(4):
        experts = experts_on(Mesh.imagine(rank, Sizes(world=4, ep=2, etp=2)), activation=activation)
        initialise(experts, seed=3)
        for name, parameter in experts.named_parameters():
            shard, part, count = shard_of(parameter), full.get_parameter(name).detach(), counts[name]
            for dim, (offset, size) in enumerate(zip(shard.box.offsets, shard.box.sizes, strict=True)):
                part, count = part.narrow(dim, offset, size), count.narrow(dim, offset, size)
            assert torch.equal(parameter, part) and shard.is_counted and shard.data is not None
            count += 1
    assert all((count == 1).all() for count in counts.values())


def test_the_weight_acts_before_the_second_matrix_and_has_its_gradient_in_float32() -> None:
    experts = experts_on(Mesh.single())
    initialise(experts, seed=0)
    weights = torch.rand(sum(SIZES), requires_grad=True)
    rows = torch.randn(sum(SIZES), 8)
    out = experts(DispatchedTokens(rows, weights, GROUPS))
    unweighted = experts(DispatchedTokens(rows, torch.ones_like(weights), GROUPS))
    torch.testing.assert_close(out, unweighted * weights[:, None].detach())
    assert (out - unweighted).abs().max() > BITE
    out.sum().backward()
    torch.testing.assert_close(weights.grad, unweighted.sum(1).detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = experts(DispatchedTokens(rows, weights, GROUPS))
    assert low.dtype == torch.bfloat16
    (grad,) = torch.autograd.grad(low.float().sum(), weights)
    assert grad.dtype == torch.float32
    torch.testing.assert_close(low.float(), out, rtol=0, atol=0.05)


def test_experts_that_ep_does_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"number of experts \(4\) must be a multiple of ep \(3\); ep may be 1, 2, 4"):
        experts_on(Mesh.imagine(0, Sizes(world=3, ep=3)))


def test_a_frozen_expert_has_no_gradient_and_rows_still_have_one() -> None:
    experts = experts_on(Mesh.single())
    initialise(experts, seed=0)
    experts.requires_grad_(False)
    rows = torch.randn(sum(SIZES), 8, requires_grad=True)
    experts(DispatchedTokens(rows, torch.rand(sum(SIZES)), GROUPS)).sum().backward()
    assert rows.grad is not None and rows.grad.count_nonzero()
    assert all(isinstance(each, nn.Parameter) and each.grad is None for each in experts.parameters())
