"""Activations equal what they are made of, and so do their gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.tensor.activation import GATED, activate

GATES = {
    "swiglu": F.silu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "clamped_swiglu": lambda x: x.clamp(max=7) * torch.sigmoid(1.702 * x.clamp(max=7)),
}


@pytest.mark.parametrize("activation", sorted(GATED))
def test_a_gate_multiplies_and_its_gradient_is_that_of_autograd(activation: str) -> None:
    # Of them some are clamped.
    x = (6 * torch.randn(3, 2, 5, dtype=torch.float64)).requires_grad_()
    assert (x > 7).any() and (x < -7).any()
    output = activate(x, activation)  # type: ignore[arg-type]
    factor = x[:, 1].clamp(-7, 7) + 1 if activation == "clamped_swiglu" else x[:, 1]
    torch.testing.assert_close(output, GATES[activation](x[:, 0]) * factor, rtol=0, atol=1e-13)
    assert torch.autograd.gradcheck(lambda x: activate(x, activation), (x,))  # type: ignore[arg-type]


def test_relu_is_relu() -> None:
    assert activate(torch.tensor([[-1.0, 2.0]]), "relu").tolist() == [[0.0, 2.0]]


def with_gradient(x: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    (grad,) = torch.autograd.grad(output, x, torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view_as(x))
    return output.detach(), grad


def test_quick_gelu_is_x_times_a_steep_sigmoid() -> None:
    x = torch.linspace(-9, 9, 60, dtype=torch.float64).view(6, 10).requires_grad_()
    found = with_gradient(x, activate(x, "quick_gelu"))
    torch.testing.assert_close(found, with_gradient(x, x * torch.sigmoid(1.702 * x)), rtol=0, atol=1e-14)
    # It is near the exact one, and not the same.
    for other in ("gelu", "gelu_tanh"):
        distance = (found[0] - activate(x.detach(), other)).abs().max()
        assert 1e-3 < distance < 0.05


def test_quick_gelu_saves_its_input_alone() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        activate(x, "quick_gelu")
    assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr()]
