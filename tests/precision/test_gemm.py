"""The float8 products equal float32 products of what their operands stand for, and cast a weight once a step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.precision.cast import E4M3, E5M2, TILE, Operand
from lightning_megatron.precision.gemm import Fp8Gemm
from lightning_megatron.precision.scaling import CurrentScaling
from tests.precision.decast import decast

T, INPUT, OUTPUT = 19, 32, 48
# Sums of at most 48 float32 products of order 1, in another order.
TOLERANCE = 1e-5


class Counted(CurrentScaling):
    """Counts its casts."""

    num_casts = 0

    def cast(self, x: Tensor, *, is_training: bool) -> Operand:
        self.num_casts += 1
        return super().cast(x, is_training=is_training)


def scaling(dtype: torch.dtype = E4M3) -> Counted:
    return Counted(dtype, 0, lambda amax: amax)


class Three:
    """A product, its weight and operands, and what the operands stand for in float32."""

    def __init__(self, gradient_dtype: torch.dtype = E5M2) -> None:
        self.weight_scaling = scaling()
        self.gemm = Fp8Gemm(x=scaling(), weight=self.weight_scaling, gradient=scaling(gradient_dtype))
        self.weight = nn.Parameter(torch.randn(2, OUTPUT // 2, INPUT))
        self.x = self.gemm.cast_input(torch.randn(T, INPUT), is_training=True)
        self.grad = self.gemm.cast_gradient(torch.randn(T, OUTPUT) * 1e-3)
        cast = scaling().cast(self.weight.detach().flatten(0, 1), is_training=True)
        self.x_TI, self.weight_OI = decast(self.x, E4M3), decast(cast, E4M3)
        self.grad_TO = decast(self.grad, gradient_dtype)

    def forward(self, is_training: bool = True) -> Tensor:
        return self.gemm.forward(self.x, self.weight, None, torch.float32, is_training=is_training)


@pytest.mark.parametrize("gradient_dtype", [E4M3, E5M2])
def test_each_product_equals_that_of_the_numbers_its_operands_stand_for(gradient_dtype: torch.dtype) -> None:
    three = Three(gradient_dtype)
    bias = torch.randn(2, OUTPUT // 2)
    y = three.gemm.forward(three.x, three.weight, bias, torch.float32, is_training=True)
    wanted = three.x_TI @ three.weight_OI.t() + bias.flatten()
    torch.testing.assert_close(y, wanted, rtol=0, atol=TOLERANCE * 10)
    dx = three.gemm.input_gradient(three.grad, three.weight, torch.float32)
    torch.testing.assert_close(dx, three.grad_TO @ three.weight_OI, rtol=0, atol=TOLERANCE)
    dw = three.gemm.weight_gradient(three.grad, three.x, three.weight)
    torch.testing.assert_close(dw, (three.grad_TO.t() @ three.x_TI).view_as(three.weight), rtol=0, atol=TOLERANCE)
    # They are float8 products: those of the tensors themselves are elsewhere by much more.
    exact = three.x_TI @ three.weight.detach().flatten(0, 1).t() + bias.flatten()
    assert (y - exact).abs().max() > 1000 * TOLERANCE


def test_operands_have_the_strides_that_a_gpu_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        three = Three()
    multiply, shapes = torch._scaled_mm, []

    def strict(left: Tensor, right: Tensor, **options: Any) -> Tensor:
        assert left.is_contiguous() and right.t().is_contiguous()
        assert left.shape[1] % TILE == 0 and right.shape[1] % TILE == 0
        assert options["scale_a"].dtype == options["scale_b"].dtype == options["out_dtype"] == torch.float32
        shapes.append((*left.shape, right.shape[1]))
        return multiply(left, right, **options)

    monkeypatch.setattr(torch, "_scaled_mm", strict)
    three.forward()
    three.gemm.input_gradient(three.grad, three.weight, torch.float32)
    three.gemm.weight_gradient(three.grad, three.x, three.weight)
    assert shapes == [(T, INPUT, OUTPUT), (T, OUTPUT, INPUT), (OUTPUT, 32, INPUT)]


def test_outputs_have_the_given_dtype() -> None:
    three = Three()
    for dtype in (torch.float32, torch.bfloat16):
        assert three.gemm.forward(three.x, three.weight, None, dtype, is_training=True).dtype == dtype
        assert three.gemm.input_gradient(three.grad, three.weight, dtype).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_add_up_in_the_dtype_of_grad(dtype: torch.dtype) -> None:
    three = Three()
    three.weight = nn.Parameter(three.weight.detach().bfloat16())
    three.weight.grad_dtype = dtype
    three.gemm.add_weight_gradient(three.weight, three.grad, three.x, None)
    assert three.weight.grad is not None and three.weight.grad.dtype == dtype
    once = three.weight.grad.float().clone()
    three.gemm.add_weight_gradient(three.weight, three.grad, three.x, None)
    wanted = (three.grad_TO.t() @ three.x_TI).view_as(three.weight)
    # A bfloat16 keeps 8 bits; a sum in it is rounded, one in float32 is not.
    tolerance = TOLERANCE if dtype == torch.float32 else 2.0**-8 * float(wanted.abs().max())
    torch.testing.assert_close(once, wanted, rtol=0, atol=tolerance)
    torch.testing.assert_close(three.weight.grad.float(), 2 * wanted, rtol=0, atol=2 * tolerance)


def test_a_weight_is_cast_once_until_the_step_ends() -> None:
    three = Three()
    for _ in range(4):
        three.forward()
        three.gemm.input_gradient(three.grad, three.weight, torch.float32)
    assert three.weight_scaling.num_casts == 1
    three.gemm.forget()
    three.forward()
    assert three.weight_scaling.num_casts == 2


def test_a_weight_that_is_freed_between_its_uses_is_cast_for_each() -> None:
    three = Three()
    three.gemm.cast_anew()
    for number in (1, 2):
        three.forward()
        three.gemm.input_gradient(three.grad, three.weight, torch.float32)
        assert three.weight_scaling.num_casts == 2 * number


def test_a_weight_that_changes_after_the_step_is_cast_anew() -> None:
    three = Three()
    before = three.forward()
    with torch.no_grad():
        three.weight.mul_(-2)
    torch.testing.assert_close(three.forward(), -2 * before, rtol=0, atol=0)
    # Torch does not count this change; `forget` reports it.
    three.weight.data.mul_(2)
    assert torch.equal(three.forward(), -2 * before)
    three.gemm.forget()
    assert torch.equal(three.forward(), -4 * before)


def test_outside_of_training_a_weight_is_never_cached() -> None:
    three = Three()
    trained = three.forward()
    three.weight.data.mul_(2)
    assert torch.equal(three.forward(is_training=False), 2 * trained)
    three.weight.data.div_(2)
    assert torch.equal(three.forward(), trained)
    assert three.weight_scaling.num_casts == 2


@pytest.mark.gpu
@pytest.mark.parametrize("gradient_dtype", [E4M3, E5M2])
def test_products_on_a_gpu_equal_those_on_the_cpu(gradient_dtype: torch.dtype) -> None:
    three = Three(gradient_dtype)

    def moved(operand: Operand) -> Operand:
        assert operand.inverse_scale is not None
        return Operand(operand.values.cuda(), operand.inverse_scale.cuda())

    x, grad, weight = moved(three.x), moved(three.grad), nn.Parameter(three.weight.detach().cuda())
    y = three.gemm.forward(x, weight, None, torch.bfloat16, is_training=True)
    wanted = three.x_TI @ three.weight_OI.t()
    # Forward sums keep some 14 bits on Hopper, and a bfloat16 keeps 8.
    torch.testing.assert_close(y.float().cpu(), wanted, rtol=2.0**-7, atol=2.0**-7 * float(wanted.abs().max()))
    dx = three.gemm.input_gradient(grad, weight, torch.bfloat16)
    wanted = three.grad_TO @ three.weight_OI
    torch.testing.assert_close(dx.float().cpu(), wanted, rtol=2.0**-7, atol=2.0**-7 * float(wanted.abs().max()))
    dw = three.gemm.weight_gradient(grad, x, weight)
    wanted = (three.grad_TO.t() @ three.x_TI).view_as(three.weight)
    torch.testing.assert_close(dw.cpu(), wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
