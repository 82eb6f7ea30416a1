"""Activation functions between the two linears of an MLP, dense or of experts.

Dims: T tokens, F features of the feed-forward network.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "swiglu", "geglu_tanh", "clamped_swiglu"]
"""Name of an activation; gated ones map gate and up, [T, 2, F], to [T, F]."""

# The slope of the sigmoid that approximates the normal distribution in quick GELU, and in gpt-oss.
_STEEPNESS = 1.702
# What gate and up are clamped to in gpt-oss. Source: openai/gpt-oss, gpt_oss/torch/model.py (swiglu).
_LIMIT = 7.0


def _clamped_gate(gate: Tensor) -> Tensor:
    """The gate of gpt-oss: x * sigmoid(1.702 x) of x, the smaller of the gate and 7."""
    clamped = gate.clamp(max=_LIMIT)
    return torch.sigmoid(_STEEPNESS * clamped).mul_(clamped)


def _clamped_gate_gradient(grad: Tensor, gate: Tensor, *, grad_input: Tensor | None = None) -> Tensor:
    share = torch.sigmoid(_STEEPNESS * gate)
    slope = (share * (1 + _STEEPNESS * gate * (1 - share))).masked_fill_(gate > _LIMIT, 0.0)
    return torch.mul(grad, slope, out=grad_input)


GATES: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
    "clamped_swiglu": _clamped_gate,
}
"""Function of the gate in gated activations."""
GATE_GRADIENTS: Mapping[Activation, Callable[..., Tensor]] = {
    "swiglu": torch.ops.aten.silu_backward,
    "geglu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "clamped_swiglu": _clamped_gate_gradient,
}
"""Gradient of the gate, from that of its function's output and the gate."""
GATED = frozenset(GATES)


def factor_of(up: Tensor, activation: Activation) -> Tensor:
    """What a gate's output is multiplied by: up itself, or in gpt-oss up between -7 and 7, plus 1."""
    return up.clamp(-_LIMIT, _LIMIT).add_(1.0) if activation == "clamped_swiglu" else up


def mask_factor_gradient_(grad_up: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The gradient of up from that of `factor_of`, in place."""
    return grad_up.masked_fill_(up.abs() > _LIMIT, 0.0) if activation == "clamped_swiglu" else grad_up


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
        return GATES[activation](gate_TF).mul_(factor_of(up_TF, activation)).detach()

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, None]:
        (gate_up_T2F,) = ctx.saved_tensors
        gate_TF, up_TF = gate_up_T2F.unbind(1)
        grad_gate_TF = GATE_GRADIENTS[ctx.activation](grad_TF * factor_of(up_TF, ctx.activation), gate_TF)
        grad_up_TF = mask_factor_gradient_(GATES[ctx.activation](gate_TF).mul_(grad_TF), up_TF, ctx.activation)
        return torch.stack((grad_gate_TF, grad_up_TF), dim=1), None


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
