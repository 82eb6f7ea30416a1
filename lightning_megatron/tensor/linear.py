"""Linear layers whose weight is cut over `tp`: by its outputs (column) or by its inputs (row).

A column layer opens a tensor-parallel region and a row layer closes it; attention and the MLP are one of each. Under
sequence parallelism `sp` is `tp`, and outside of the region each rank holds T/sp tokens; otherwise `sp` has size 1.

    column   y = gather(x) W^T + b    W cut by rows: [O/tp, I]       dx = sum over tp of dy W, back to T/sp tokens
    row      y = sum(x W^T) + b       W cut by columns: [O, I/tp]    dx = gather(dy) W

Dims: T tokens, I features in, O features out.
Source: Narayanan et al., arXiv 2104.04473, section 2.3; Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.comm import collectives
from lightning_megatron.comm.collectives import Pending
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Initial, shard_parameter
from lightning_megatron.tensor.weight_gradients import Way, WeightGradientLayer, WeightGradients, add_product


class ColumnParallelLinear(WeightGradientLayer):
    """[T/sp, in_features] to [T, *out_shape], the dim `cut` of `out_shape` cut over `tp`; weight [*out_shape, in]."""

    def __init__(
        self,
        in_features: int,
        out_shape: int | tuple[int, ...],
        *,
        tp: Axis,
        sp: Axis,
        bias: bool,
        initial: Initial,
        cut: int = 0,
    ) -> None:
        super().__init__()
        self.tp, self.sp = tp, sp
        shape = (out_shape,) if isinstance(out_shape, int) else out_shape
        dim = cut % len(shape)
        self.weight = shard_parameter((*shape, in_features), initial=initial, dim=dim, axis=tp)
        self.bias = shard_parameter(shape, initial=Initial(), dim=dim, axis=tp) if bias else None

    def forward(self, x_TI: Tensor) -> Tensor:
        return column_parallel_linear(
            x_TI, self.weight, self.bias, tp=self.tp, sp=self.sp, gradients=self.weight_gradients
        )


class RowParallelLinear(WeightGradientLayer):
    """[T, in_features/tp] to [T/sp, out_features]; weight [out, in/tp], bias whole on every rank of `tp`."""

    def __init__(
        self, in_features: int, out_features: int, *, tp: Axis, sp: Axis, bias: bool, initial: Initial
    ) -> None:
        super().__init__()
        self.tp, self.sp = tp, sp
        self.weight = shard_parameter((out_features, in_features), initial=initial, dim=1, axis=tp)
        self.bias = shard_parameter((out_features,), initial=Initial(), replicas=(tp,), partial=sp) if bias else None

    def forward(self, x_TI: Tensor) -> Tensor:
        return row_parallel_linear(
            x_TI, self.weight, self.bias, tp=self.tp, sp=self.sp, gradients=self.weight_gradients
        )


def column_parallel_linear(
    x_TI: Tensor, weight: Tensor, bias: Tensor | None, *, tp: Axis, sp: Axis, gradients: WeightGradients
) -> Tensor:
    """[T, *weight.shape[:-1]] from [T/sp, I], for a weight (tied, say) that is not this layer's own.

    The gradient of the weight goes where `gradients` says. Keeps the T/sp tokens alone for backward and gathers them
    again there.
    """
    y_TO: Tensor = _Column.apply(x_TI.to(_compute_dtype(x_TI)), weight, bias, tp, sp, gradients)
    # Here and not in the Function: autograd refuses to change in place a view that a Function made.
    return y_TO.view(y_TO.shape[0], *weight.shape[:-1])


def row_parallel_linear(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, tp: Axis, sp: Axis, gradients: WeightGradients
) -> Tensor:
    """[T/sp, O] from [T, I/tp] and a weight [O, I/tp]; the bias is added once, after the sum over `tp`."""
    y_TO: Tensor = _Row.apply(x_TI.to(_compute_dtype(x_TI)), weight_OI, bias_O, tp, sp, gradients)
    return y_TO


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, sp: Axis, gradients: WeightGradients
    ) -> Tensor:
        ctx.tp, ctx.sp, ctx.gradients = tp, sp, gradients
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return F.linear(collectives.all_gather(x, sp), _as(x, weight).flatten(0, -2), _as(x, bias, flat=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        # Note: what hides what. The gather of x flies behind the input's gradient; that gradient's own sum flies
        # behind those of weight and bias.
        x, weight = ctx.saved_tensors
        sp: Axis = ctx.sp
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        way = ctx.gradients.way(weight) if needs_weight else Way.QUEUE
        if way is not Way.QUEUE:
            x_work = collectives.all_gather(x, sp, wait=False)
        if needs_x:
            grad_x_work = _sum_to_shard(grad_TO.mm(_as(grad_TO, weight).flatten(0, -2)), ctx.tp, sp)
        if way is not Way.QUEUE:
            grad_weight = _weight_gradient(way, weight, grad_TO, x_work.wait())
        elif needs_weight:
            # Gathered when its time comes: until then the shard is enough.
            ctx.gradients.hand_in(lambda: add_product(weight, grad_TO.t(), collectives.all_gather(x, sp)))
        if needs_bias:
            grad_bias = grad_TO.sum(0).view(weight.shape[:-1]).to(weight.dtype)
        if needs_x:
            grad_x = grad_x_work.wait()
        return grad_x, grad_weight, grad_bias, None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, sp: Axis, gradients: WeightGradients
    ) -> Tensor:
        ctx.sp, ctx.gradients = sp, gradients
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        y_TO = _sum_to_shard(F.linear(x, _as(x, weight)), tp, sp).wait()
        # Before the sum, tp ranks would add it tp times.
        return y_TO if bias is None else y_TO.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_weight = None
        grad_work = collectives.all_gather(grad, ctx.sp, wait=False)
        # Of this rank's tokens alone: under sequence parallelism a part of a sum.
        grad_bias = grad.sum(0).to(weight.dtype) if needs_bias else None
        grad_TO = grad_work.wait()
        grad_x = grad_TO.mm(_as(grad_TO, weight)) if needs_x else None
        if needs_weight:
            way = ctx.gradients.way(weight)
            if way is Way.QUEUE:
                ctx.gradients.hand_in(lambda: add_product(weight, grad_TO.t(), x))
            else:
                grad_weight = _weight_gradient(way, weight, grad_TO, x)
        return grad_x, grad_weight, grad_bias, None, None, None


def _weight_gradient(way: Way, weight: Tensor, grad_TO: Tensor, x_TI: Tensor) -> Tensor | None:
    """What autograd is to get: the gradient of the weight, or nothing where it has gone to `.grad` already."""
    if way is Way.ADD:
        add_product(weight, grad_TO.t(), x_TI)
        return None
    return grad_TO.t().mm(x_TI).view(weight.shape).to(weight.dtype)


def _sum_to_shard(part: Tensor, tp: Axis, sp: Axis) -> Pending:
    """The sum over `tp` of `part`, which it may overwrite: under sequence parallelism this rank's T/sp tokens of it."""
    if sp.size == tp.size:
        return collectives.reduce_scatter(part, sp, wait=False)
    return collectives.all_reduce_(part, tp, wait=False)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the product: autocast's, if it is on; as in torch, float64 is left alone."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(device)


def _as(x: Tensor, parameter: Any, *, flat: bool = False) -> Any:
    """A parameter in the dtype of `x` under autocast.

    Inside the Functions and once a direction: what a cast in front of them returned would be kept for backward by every
    microbatch in flight, a copy of all weights each.
    """
    if parameter is None:
        return None
    cast = parameter.to(x.dtype) if x.dtype != parameter.dtype and parameter.dtype != torch.float64 else parameter
    return cast.flatten() if flat else cast
