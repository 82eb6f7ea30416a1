"""A whole linear with a gemm computes what nn.Linear does, and is that again when the gemm is taken back."""

import pytest
import torch
from torch import nn

from lightning_megatron.precision.cast import E4M3, E5M2
from lightning_megatron.precision.gemm import Fp8Gemm, Gemm
from lightning_megatron.precision.scaling import CurrentScaling
from lightning_megatron.tensor.gemm import TORCH_GEMM
from lightning_megatron.tensor.whole_linear import WholeLinear, lend_gemm, take_gemm_back


def fp8_gemm() -> Fp8Gemm:
    x, weight, gradient = (CurrentScaling(dtype, 0, lambda amax: amax) for dtype in (E4M3, E4M3, E5M2))
    return Fp8Gemm(x=x, weight=weight, gradient=gradient)


def numbers(linear: nn.Linear, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of input, weight and bias by a fixed function of it."""
    x = x.clone().requires_grad_()
    y = linear(x)
    loss = (y * torch.arange(y.numel(), dtype=y.dtype).cos().view(y.shape)).sum()
    return [y.detach(), *torch.autograd.grad(loss, [x, *linear.parameters()])]


@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 5, 16)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_with_torchs_gemm_it_computes_what_nn_linear_does(shape: tuple[int, ...], has_bias: bool) -> None:
    linear = nn.Linear(16, 32, bias=has_bias, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64)
    wanted = numbers(linear, x)
    lend_gemm(linear, TORCH_GEMM)
    for own, of_torch in zip(numbers(linear, x), wanted, strict=True):
        torch.testing.assert_close(own, of_torch, rtol=0, atol=1e-14)


def test_a_lent_gemm_multiplies_and_nothing_of_it_stays() -> None:
    linear, called = nn.Linear(16, 32), []
    weight = linear.weight
    linear.register_forward_hook(lambda *_: called.append("hook"))
    before = dict(vars(linear))
    x = torch.randn(4, 16)
    wanted = numbers(linear, x)
    lend_gemm(linear, fp8_gemm())
    assert isinstance(linear, WholeLinear) and linear.weight is weight
    for own, of_torch in zip(numbers(linear, x)[:3], wanted, strict=False):
        # An operand in float8 is off by at most 2^-4 of itself, a gradient in e5m2 by 2^-3: off, and not far.
        deviation = float((own - of_torch).norm() / of_torch.norm())
        assert 1e-3 < deviation < 2.0**-3 + 2.0**-4
    take_gemm_back(linear)
    assert type(linear) is nn.Linear and vars(linear) == before and not linear._forward_pre_hooks
    assert all(torch.equal(own, of_torch) for own, of_torch in zip(numbers(linear, x), wanted, strict=True))
    assert called == ["hook"] * 3


def encoded(gemm: Gemm | None) -> torch.Tensor:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    if gemm is not None:
        lend_gemm(layer.linear1, gemm)
    with torch.no_grad():
        return layer(torch.linspace(-1, 1, 2 * 5 * 16).view(2, 5, 16))  # type: ignore[no-any-return]


def test_a_layer_of_torch_multiplies_by_the_gemm_in_evaluation_too() -> None:
    torch.testing.assert_close(encoded(TORCH_GEMM), encoded(None), rtol=0, atol=1e-5)
    assert (encoded(fp8_gemm()) - encoded(None)).abs().max() > 1e-3
