"""Activation functions between the two linears of an MLP, dense or of experts.

Dims: T tokens, F features of the feed-forward network.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "swiglu", "geglu_tanh"]
"""Name of an activation; gated ones map gate and up, [T, 2, F], to [T, F]."""
GATED: frozenset[Activation] = frozenset(("swiglu", "geglu_tanh"))

# The slope of the sigmoid that approximates the normal distribution in quick GELU.
_STEEPNESS = 1.702


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Activation of `x` [T, F] (gated: [T, 2, F]): [T, F]."""
    if activation == "swiglu":
        return swiglu(x)
    if activation == "geglu_tanh":
        return geglu_tanh(x)
    if activation == "relu":
        return F.relu(x)
    if activation == "quick_gelu":
        return quick_gelu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up of [T, 2, F]; saves only its input for backward, where autograd would save silu(gate) too."""

    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_T2F)
        gate_TF, up_TF = gate_up_T2F.unbind(1)
        return F.silu(gate_TF).mul_(up_TF)

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> Tensor:
        (gate_up_T2F,) = ctx.saved_tensors
        gate_TF, up_TF = gate_up_T2F.unbind(1)
        grad_gate_TF = torch.ops.aten.silu_backward(grad_TF * up_TF, gate_TF)
        return torch.stack((grad_gate_TF, F.silu(gate_TF).mul_(grad_TF)), dim=1)


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up: [T, 2, F] to [T, F]. Source: Shazeer, arXiv 2002.05202, section 2."""
    activated: Tensor = _SwiGLU.apply(gate_up_T2F)
    return activated


class _GeGLU(torch.autograd.Function):
    """gelu(gate) * up of [T, 2, F] by the tanh approximation; saves only its input for backward."""

    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_T2F)
        gate_TF, up_TF = gate_up_T2F.unbind(1)
        return F.gelu(gate_TF, approximate="tanh").mul_(up_TF)

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> Tensor:
        (gate_up_T2F,) = ctx.saved_tensors
        gate_TF, up_TF = gate_up_T2F.unbind(1)
        grad_gate_TF = torch.ops.aten.gelu_backward(grad_TF * up_TF, gate_TF, approximate="tanh")
        return torch.stack((grad_gate_TF, F.gelu(gate_TF, approximate="tanh").mul_(grad_TF)), dim=1)


def geglu_tanh(gate_up_T2F: Tensor) -> Tensor:
    """gelu(gate) * up: [T, 2, F] to [T, F]. Source: Shazeer, arXiv 2002.05202, section 2."""
    activated: Tensor = _GeGLU.apply(gate_up_T2F)
    return activated


class _QuickGELU(torch.autograd.Function):
    """x * sigmoid(1.702 x); saves only its input for backward, where autograd would save three tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sigmoid(_STEEPNESS * x).mul_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(_STEEPNESS * x)
        slope: Tensor = gate * (1 + _STEEPNESS * x * (1 - gate))
        return grad * slope


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), as CLIP has it. Source: Hendrycks and Gimpel, arXiv 1606.08415, section 2."""
    activated: Tensor = _QuickGELU.apply(x)
    return activated
