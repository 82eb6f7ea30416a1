"""The activation between the two linears of a feed-forward network, of dense layers and of experts.

Dims: T tokens, F features of the feed-forward network.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["gelu", "gelu_tanh", "swiglu"]
"""swiglu takes gate and up, [T, 2, F], and gives [T, F]."""


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The activation of `x`, [T, F]."""
    if activation == "swiglu":
        return swiglu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up of [T, 2, F]; keeps its input alone, where autograd would keep silu(gate) too."""

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
