"""The activation between the matrices of experts, each row scaled by its router probability.

Gated activations save only their input for backward and recompute their output there, which autograd would save
besides the scaled rows that the second matrix reads.

R rows, F features of an expert.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.tensor.activation import (
    GATE_GRADIENTS,
    GATES,
    Activation,
    activate,
    factor_of,
    mask_factor_gradient_,
)


def weighted_activation(x: Tensor, probs_R: Tensor, activation: Activation) -> Tensor:
    """Activation of `x` [R, F] (gated: [R, 2, F]), each row scaled by its router probability: [R, F]."""
    if activation not in GATES:
        return scale_rows(activate(x, activation), probs_R)
    weighed: Tensor = _WeighedGate.apply(x, probs_R, activation)
    return weighed


def scale_rows(x_RF: Tensor, probs_R: Tensor) -> Tensor:
    """Rows scaled by `probs_R` in float32 or wider, in the dtype of the rows."""
    return (x_RF * _wide_column(x_RF, probs_R)).to(x_RF.dtype)


class _WeighedGate(torch.autograd.Function):
    """Activated gate times up, of [R, 2, F], scaled by the probabilities."""

    @staticmethod
    def forward(ctx: Any, gate_up_R2F: Tensor, probs_R: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate_up_R2F, probs_R)
        ctx.activation = activation
        gate_RF, up_RF = gate_up_R2F.unbind(1)
        return scale_rows(GATES[activation](gate_RF).mul_(factor_of(up_RF, activation)), probs_R).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gate_up_R2F, probs_R = ctx.saved_tensors
        gate_RF, up_RF = gate_up_R2F.unbind(1)
        grad_activated_RF = scale_rows(grad_RF, probs_R)
        gate_gradient = GATE_GRADIENTS[ctx.activation]
        # Both gradients are written in place: joining them afterwards would copy them.
        grad_R2F = torch.empty_like(gate_up_R2F, memory_format=torch.contiguous_format)
        activated_RF = GATES[ctx.activation](gate_RF)
        torch.mul(activated_RF, grad_activated_RF, out=grad_R2F[:, 1])
        mask_factor_gradient_(grad_R2F[:, 1], up_RF, ctx.activation)
        factor_RF = factor_of(up_RF, ctx.activation)
        gate_gradient(grad_activated_RF.mul_(factor_RF), gate_RF, grad_input=grad_R2F[:, 0])
        # Peak memory follows.
        del grad_activated_RF
        grad_probs_R = None
        if ctx.needs_input_grad[1]:
            wide = _wide_column(grad_RF, probs_R).dtype
            product_RF = activated_RF.mul_(factor_RF).to(wide)
            grad_probs_R = product_RF.mul_(grad_RF).sum(1).to(probs_R.dtype)
        return grad_R2F, grad_probs_R, None


def _wide_column(x_RF: Tensor, probs_R: Tensor) -> Tensor:
    """The probabilities [R, 1] in float32 or wider, at least as wide as the rows."""
    wide = torch.promote_types(torch.promote_types(x_RF.dtype, probs_R.dtype), torch.float32)
    return probs_R[:, None].to(wide)
