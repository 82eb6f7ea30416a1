"""The float8 products of experts equal float32 products of what their operands stand for, expert by expert."""

import pytest
import torch
from torch import Tensor

from lightning_megatron.mesh import Mesh
from lightning_megatron.moe.experts import DispatchedTokens, ExpertAxes, Experts
from lightning_megatron.moe.grouped_gemm import ExpertGroups, grouped_linear
from lightning_megatron.moe.grouped_gemm_fp8 import GroupedFp8Gemm
from lightning_megatron.precision.cast import E4M3, E5M2, Operand
from lightning_megatron.precision.scaling import CurrentScaling
from lightning_megatron.sharding import Initial
from lightning_megatron.tensor.weight_gradients import Task, WeightGradients
from lightning_megatron.transformer.init import initialise
from tests.precision.decast import decast

SIZES = (5, 0, 17, 1)
GROUPS = ExpertGroups.known(SIZES, torch.tensor(SIZES))
# Sums of at most 32 float32 products of order 1, in another order.
TOLERANCE = 1e-4


class Counted(CurrentScaling):
    """Counts its casts."""

    num_casts = 0

    def cast(self, x: Tensor, *, is_training: bool) -> Operand:
        self.num_casts += 1
        return super().cast(x, is_training=is_training)


def scaling(dtype: torch.dtype = E4M3) -> Counted:
    return Counted(dtype, 0, lambda amax: amax)


def gemm_of(weight: Counted | None = None) -> GroupedFp8Gemm:
    return GroupedFp8Gemm(len(SIZES), x=scaling(), weight=weight or scaling(), gradient=scaling(E5M2))


def stood_for(x: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    return decast(scaling(dtype).cast(x.detach(), is_training=True), dtype)


@pytest.mark.parametrize("out_shape", [(32,), (2, 16)])
def test_output_and_gradients_are_those_of_the_numbers_that_operands_stand_for(out_shape: tuple[int, ...]) -> None:
    x = torch.randn(sum(SIZES), 16, requires_grad=True)
    # Experts of very different sizes: one scale for all would lose the smaller ones.
    weight = (
        torch.randn(len(SIZES), *out_shape, 16)
        * torch.tensor([1.0, 1.0, 1e-4, 1e3]).view(4, *[1] * (len(out_shape) + 1))
    ).requires_grad_()
    y_grad = torch.randn(sum(SIZES), *out_shape)
    y = grouped_linear(x, weight, GROUPS, gradients=WeightGradients(), gemm=gemm_of())
    y.backward(y_grad)
    assert x.grad is not None and weight.grad is not None
    rows, grads = stood_for(x), stood_for(y_grad.flatten(1), E5M2)
    start = 0
    for expert, size in enumerate(SIZES):
        own, start = slice(start, start + size), start + size
        of_expert = stood_for(weight[expert].flatten(0, -2))
        scale = float(of_expert.abs().max())
        wanted = rows[own] @ of_expert.t()
        torch.testing.assert_close(y[own].flatten(1), wanted, rtol=0, atol=TOLERANCE * scale)
        torch.testing.assert_close(x.grad[own], grads[own] @ of_expert, rtol=0, atol=TOLERANCE * scale)
        torch.testing.assert_close(
            weight.grad[expert].flatten(0, -2), grads[own].t() @ rows[own], rtol=0, atol=TOLERANCE
        )
        if size:
            assert (y[own].flatten(1) - x[own] @ weight[expert].flatten(0, -2).t()).abs().max() > 10 * TOLERANCE * scale
    assert weight.grad[1].count_nonzero() == 0


def test_each_weight_is_cast_once_a_step_rows_or_none() -> None:
    counted = scaling()
    gemm = gemm_of(counted)
    x, weight = torch.randn(sum(SIZES), 16), torch.randn(4, 32, 16, requires_grad=True)

    def run() -> None:
        grouped_linear(x, weight, GROUPS, gradients=WeightGradients(), gemm=gemm).sum().backward()

    run()
    run()
    assert counted.num_casts == len(SIZES)
    gemm.forget()
    run()
    assert counted.num_casts == 2 * len(SIZES)
    with torch.no_grad():
        # Outside of training what is there now is cast, and only what has rows.
        grouped_linear(x, weight, GROUPS, gradients=WeightGradients(), gemm=gemm)
    assert counted.num_casts == 2 * len(SIZES) + 3


def experts_in_fp8() -> Experts:
    experts = Experts(
        4,
        16,
        32,
        activation="swiglu",
        initial=Initial(std=0.3),
        output_initial=Initial(std=0.3),
        axes=ExpertAxes.of(Mesh.single()),
        has_bias=True,
    )
    initialise(experts, seed=1)
    experts.up_gemm, experts.down_gemm = gemm_of(), gemm_of()
    return experts


@pytest.mark.parametrize("is_queued", [False, True])
def test_weight_gradients_that_are_added_later_or_wider_are_those_of_autograd(is_queued: bool) -> None:
    arrived = DispatchedTokens(torch.randn(sum(SIZES), 16), torch.rand(sum(SIZES)), GROUPS)
    wanted, experts = experts_in_fp8(), experts_in_fp8()
    gradients, queue = WeightGradients(), list[Task]()
    experts.weight_gradients = gradients
    for _ in range(2):
        wanted(arrived).sum().backward()
        out = experts(arrived).sum()
        with gradients.opened(queue if is_queued else None):
            out.backward()
    assert len(queue) == (4 if is_queued else 0)
    for _, task in queue:
        task()
    for name, parameter in wanted.named_parameters():
        torch.testing.assert_close(experts.get_parameter(name).grad, parameter.grad, rtol=1e-6, atol=1e-6)


def test_tokens_are_saved_for_backward_as_bytes() -> None:
    experts = experts_in_fp8()
    num_saved: dict[torch.dtype, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in experts.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters and tensor.dim() > 1:
            num_saved[tensor.dtype] = num_saved.get(tensor.dtype, 0) + tensor.numel()
        return tensor

    num_rows = sum(SIZES)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        experts(DispatchedTokens(torch.randn(num_rows, 16, requires_grad=True), torch.rand(num_rows), GROUPS))
    assert num_saved[torch.uint8] == num_rows * (16 + 32)


def test_no_rows_at_all_give_gradients_of_zeros() -> None:
    experts = experts_in_fp8()
    nothing = ExpertGroups.known((0,) * 4, torch.zeros(4, dtype=torch.int64))
    rows = torch.randn(0, 16, requires_grad=True)
    experts(DispatchedTokens(rows, torch.rand(0), nothing)).sum().backward()
    assert rows.grad is not None and rows.grad.shape == (0, 16)
    for parameter in experts.parameters():
        assert parameter.grad is not None and parameter.grad.count_nonzero() == 0
