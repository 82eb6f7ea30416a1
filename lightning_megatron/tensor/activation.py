"""Activation functions between the two linears of an MLP, dense or of experts.

Dims: T tokens, F features of the feed-forward network.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "swiglu", "geglu_tanh"]
"""Name of an activation; gated ones map gate and up, [T, 2, F], to [T, F]."""

GATES: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
}
"""Function of the gate in gated activations."""
GATE_GRADIENTS: Mapping[Activation, Callable[..., Tensor]] = {
    "swiglu": torch.ops.aten.silu_backward,
    "geglu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}
"""Gradient of the gate, from that of its function's output and the gate."""
GATED = frozenset(GATES)

# The slope of the sigmoid that approximates the normal distribution in quick GELU.
_STEEPNESS = 1.702


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Activation of `x` [T, F] (gated: [T, 2, F]): [T, F]."""
    activated: Tensor
    if activation in GATES:
        activated = _Gated.apply(x, activation)
        return activated
    if activation == "relu":
        return F.relu(x)
    if activation == "quick_gelu":
        activated = _QuickGELU.apply(x)
        return activated
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class _Gated(torch.autograd.Function):
    """f(gate) * up of [T, 2, F]; saves only its input for backward, where autograd would save f(gate) too.

    Source: Shazeer, arXiv 2002.05202, section 2.
    """

    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate_up_T2F)
        ctx.activation = activation
        gate_TF, up_TF = gate_up_T2F.unbind(1)
        return GATES[activation](gate_TF).mul_(up_TF).detach()

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, None]:
        (gate_up_T2F,) = ctx.saved_tensors
        gate_TF, up_TF = gate_up_T2F.unbind(1)
        grad_gate_TF = GATE_GRADIENTS[ctx.activation](grad_TF * up_TF, gate_TF)
        return torch.stack((grad_gate_TF, GATES[ctx.activation](gate_TF).mul_(grad_TF)), dim=1), None


class _QuickGELU(torch.autograd.Function):
    """x * sigmoid(1.702 x), as CLIP has it; saves only its input for backward, where autograd would save three tensors.

    Source: Hendrycks and Gimpel, arXiv 1606.08415, section 2.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sigmoid(_STEEPNESS * x).mul_(x).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(_STEEPNESS * x)
        slope: Tensor = gate * (1 + _STEEPNESS * x * (1 - gate))
        return grad * slope
