"""Layer norm and RMS norms over the hidden dim, on activations that may be cut over `sp`.

The parameters are replicated over `tp`; under sequence parallelism each rank sees its T/sp tokens alone, so
their gradients are partial sums. Half inputs are normed in float32, in which the parameters are held, and the result is
rounded once. For the backward the input is saved as it is given, and not the wider copy of it. Dims: H hidden.
Source: Ba et al., arXiv 1607.06450; Zhang and Sennrich, arXiv 1910.07467.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_megatron.comm import differentiable
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Initial, shard_parameter

_ATEN = torch.ops.aten


class LayerNorm(nn.Module):
    """Layer norm of [..., H] along H, scaled and shifted; dtype as the input."""

    def __init__(self, hidden_size: int, *, eps: float, tp: Axis, sp: Axis) -> None:
        super().__init__()
        self.eps = eps
        self.weight = shard_parameter((hidden_size,), initial=Initial(mean=1.0), replicas=(tp,), partial=sp)
        self.bias = shard_parameter((hidden_size,), initial=Initial(), replicas=(tp,), partial=sp)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            # Torch saves the same, and has all derivatives.
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        y: Tensor = _LayerNorm.apply(x, self.weight, self.bias, self.eps)
        return y


class RMSNorm(nn.Module):
    """RMS norm of [..., H] along H, scaled; dtype as the input."""

    # What a weight of 0 scales by.
    center = 0.0

    def __init__(self, hidden_size: int, *, eps: float, tp: Axis, sp: Axis) -> None:
        super().__init__()
        self.eps = eps
        initial = Initial(mean=1.0 - self.center)
        self.weight = shard_parameter((hidden_size,), initial=initial, replicas=(tp,), partial=sp)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.center if self.center else self.weight
        if x.dtype == weight.dtype:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        y: Tensor = _RMSNorm.apply(x, weight, self.eps)
        return y


class ZeroCenteredRMSNorm(RMSNorm):
    """RMS norm scaled by 1 + weight, so that a weight begins, and decays to, 0."""

    center = 1.0


class ParallelRMSNorm(nn.Module):
    """RMS norm along H of [..., H/tp], which ranks of `tp` have a part of each; dtype as the input.

    Waits for `tp` once in either direction.
    """

    def __init__(self, hidden_size: int, *, eps: float, tp: Axis) -> None:
        super().__init__()
        self.eps, self.tp, self.hidden_size = eps, tp, hidden_size
        self.weight = shard_parameter((hidden_size,), initial=Initial(mean=1.0), dim=0, axis=tp)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        own = wide.square().sum(-1, keepdim=True)
        total = differentiable.reduce(differentiable.copy(own, self.tp), self.tp)
        normed = wide * torch.rsqrt(total / self.hidden_size + self.eps)
        return (normed * self.weight.to(wide.dtype)).to(x.dtype)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, weight.dtype)
        y, mean, rstd = torch.native_layer_norm(x.to(wide), weight.shape, weight.to(wide), bias.to(wide), eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, weight.dtype)
        grad_x, grad_weight, grad_bias = _ATEN.native_layer_norm_backward(
            grad.to(wide),
            x.to(wide),
            weight.shape,
            mean,
            rstd,
            weight.to(wide),
            bias.to(wide),
            ctx.needs_input_grad[:3],
        )
        return _to(grad_x, x), _to(grad_weight, weight), _to(grad_bias, bias), None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, weight.dtype)
        y, rstd = _ATEN._fused_rms_norm(x.to(wide), weight.shape, weight.to(wide), eps)
        ctx.save_for_backward(x, rstd, weight)
        rounded: Tensor = y.to(x.dtype)
        return rounded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, weight = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, weight.dtype)
        # Torch has no such kernel on a CPU.
        gradients = _rms_gradients if x.device.type == "cpu" else _ATEN._fused_rms_norm_backward
        grad_x, grad_weight = gradients(
            grad.to(wide), x.to(wide), weight.shape, rstd, weight.to(wide), ctx.needs_input_grad[:2]
        )
        return _to(grad_x, x), _to(grad_weight, weight), None


def _rms_gradients(
    grad: Tensor, x: Tensor, shape: torch.Size, rstd: Tensor, weight: Tensor, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the input [..., H] and of the weight [H] of an RMS norm y = weight x rstd."""
    normed = x * rstd
    grad_weight = (grad * normed).reshape(-1, *shape).sum(0) if needed[1] else None
    if not needed[0]:
        return None, grad_weight
    grad_normed = grad * weight
    inner = (grad_normed * normed).mean(-1, keepdim=True)
    return grad_normed.addcmul_(normed, inner, value=-1).mul_(rstd), grad_weight


def _to(gradient: Tensor | None, of: Tensor) -> Tensor | None:
    """The gradient of a tensor, in its dtype."""
    return None if gradient is None else gradient.to(of.dtype)
