"""Linear layers whose weight is cut over `tp`: by its outputs (column) or by its inputs (row).

A column layer opens a tensor-parallel region and a row layer closes it; attention and the MLP are one of each. Under
sequence parallelism `sp` is `tp`, and outside of the region each rank holds T/sp tokens; otherwise `sp` has size 1.

    column   y = gather(x) W^T + b    W cut by rows: [O/tp, I]       dx = sum over tp of dy W, back to T/sp tokens
    row      y = sum(x W^T) + b       W cut by columns: [O, I/tp]    dx = gather(dy) W

How a layer multiplies is its `gemm`; what travels and is kept for backward is what the gemm made of it.
Dims: T tokens, I features in, O features out.
Source: Narayanan et al., arXiv 2104.04473, section 2.3; Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_megatron.comm import collectives
from lightning_megatron.comm.collectives import Pending
from lightning_megatron.mesh import Axis
from lightning_megatron.precision.autocast import autocast_dtype
from lightning_megatron.precision.cast import Operand
from lightning_megatron.precision.gemm import Gemm
from lightning_megatron.sharding import Initial, shard_parameter
from lightning_megatron.tensor.gemm import TORCH_GEMM
from lightning_megatron.tensor.weight_gradients import Way, WeightGradientLayer, WeightGradients


class TokenKeys(Protocol):
    """The random keys of a stream of tokens, which name what is dropped of them."""

    @property
    def shard_keys(self) -> Tensor:
        """Those of this rank's part of the stream: int64 [T/sp]."""
        ...

    @property
    def stream_keys(self) -> Tensor:
        """Those of all of it: int64 [T]."""
        ...


class ParallelLinear(WeightGradientLayer):
    """A linear layer over `tp` that multiplies as its `gemm` says.

    `lora`, where it is there, is a low-rank path beside it (`tensor.low_rank`): it gets the same input, and the keys of
    its tokens, and what it returns is added.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    lora: nn.Module | None

    def __init__(self, tp: Axis, sp: Axis) -> None:
        super().__init__()
        self.tp, self.sp = tp, sp
        self.gemm: Gemm = TORCH_GEMM
        self.lora = None

    def _with_lora(self, y_TO: Tensor, x_TI: Tensor, tokens: TokenKeys | None) -> Tensor:
        return y_TO if self.lora is None else y_TO + self.lora(x_TI, tokens)

    @property
    def input_axis(self) -> Axis:
        """The axis whose ranks hold parts of the input; of size 1 where each holds it whole."""
        raise NotImplementedError

    @property
    def gradient_axis(self) -> Axis:
        """The same for the gradient of the output."""
        raise NotImplementedError


class ColumnParallelLinear(ParallelLinear):
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
        super().__init__(tp, sp)
        shape = (out_shape,) if isinstance(out_shape, int) else out_shape
        dim = cut % len(shape)
        self.weight = shard_parameter((*shape, in_features), initial=initial, dim=dim, axis=tp)
        self.bias = shard_parameter(shape, initial=Initial(), dim=dim, axis=tp) if bias else None

    @property
    def input_axis(self) -> Axis:
        return self.sp

    @property
    def gradient_axis(self) -> Axis:
        return self.tp

    def forward(self, x_TI: Tensor, tokens: TokenKeys | None = None) -> Tensor:
        y_TO = column_parallel_linear(
            x_TI,
            self.weight,
            self.bias,
            tp=self.tp,
            sp=self.sp,
            gradients=self.weight_gradients,
            gemm=self.gemm,
        )
        return self._with_lora(y_TO, x_TI, tokens)


class RowParallelLinear(ParallelLinear):
    """[T, in_features/tp] to [T/sp, out_features]; weight [out, in/tp], bias whole on every rank of `tp`."""

    def __init__(
        self, in_features: int, out_features: int, *, tp: Axis, sp: Axis, bias: bool, initial: Initial
    ) -> None:
        super().__init__(tp, sp)
        self.weight = shard_parameter((out_features, in_features), initial=initial, dim=1, axis=tp)
        self.bias = shard_parameter((out_features,), initial=Initial(), replicas=(tp,), partial=sp) if bias else None

    @property
    def input_axis(self) -> Axis:
        return self.tp

    @property
    def gradient_axis(self) -> Axis:
        return self.sp

    def forward(self, x_TI: Tensor, tokens: TokenKeys | None = None) -> Tensor:
        y_TO = row_parallel_linear(
            x_TI,
            self.weight,
            self.bias,
            tp=self.tp,
            sp=self.sp,
            gradients=self.weight_gradients,
            gemm=self.gemm,
        )
        return self._with_lora(y_TO, x_TI, tokens)


def column_parallel_linear(
    x_TI: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    tp: Axis,
    sp: Axis,
    gradients: WeightGradients,
    gemm: Gemm = TORCH_GEMM,
) -> Tensor:
    """[T, *weight.shape[:-1]] from [T/sp, I], for a weight (tied, say) that is not this layer's own.

    The gradient of the weight goes where `gradients` says. Keeps the T/sp tokens alone for backward and gathers them
    again there.
    """
    x_TI = as_gemm_input(x_TI)
    # Not known any more within the Function, where no graph is made.
    is_training = torch.is_grad_enabled()
    y_TO: Tensor = _Column.apply(x_TI, weight, bias, tp, sp, gradients, gemm, is_training)
    # Here and not in the Function: autograd refuses to change in place a view that a Function made.
    return y_TO.view(y_TO.shape[0], *weight.shape[:-1])


def row_parallel_linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    *,
    tp: Axis,
    sp: Axis,
    gradients: WeightGradients,
    gemm: Gemm = TORCH_GEMM,
) -> Tensor:
    """[T/sp, O] from [T, I/tp] and a weight [O, I/tp]; the bias is added once, after the sum over `tp`."""
    x_TI = as_gemm_input(x_TI)
    is_training = torch.is_grad_enabled()
    y_TO: Tensor = _Row.apply(x_TI, weight_OI, bias_O, tp, sp, gradients, gemm, is_training)
    return y_TO


def as_gemm_input(x: Tensor) -> Tensor:
    """`x` in the dtype of the product, as a linear keeps it: autocast's, if it is on; float64 is left alone."""
    dtype = autocast_dtype(x)
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)


# Note: a weight is its owner. What autograd saved of a weight comes back as another tensor wherever hooks look after
# saved tensors (recomputation, offloading): a gradient put on that one would be lost. `ctx.owner` is the weight itself.
class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tp: Axis,
        sp: Axis,
        gradients: WeightGradients,
        gemm: Gemm,
        is_training: bool,
    ) -> Tensor:
        ctx.tp, ctx.sp, ctx.gradients, ctx.gemm, ctx.dtype = tp, sp, gradients, gemm, x.dtype
        ctx.owner = weight
        kept = gemm.cast_input(x, is_training=is_training)
        _keep(ctx, kept, weight)
        return gemm.forward(_gathered(kept, sp), weight, bias, x.dtype, is_training=is_training)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        # Note: what hides what. The gather of x flies behind the input's gradient; that gradient's own sum flies
        # behind those of weight and bias.
        x, weight = _kept(ctx)
        sp: Axis = ctx.sp
        gemm: Gemm = ctx.gemm
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        grad = gemm.cast_gradient(grad_TO)
        owner: Tensor = ctx.owner
        way = ctx.gradients.way(owner) if needs_weight else Way.QUEUE
        if way is not Way.QUEUE:
            x_work = collectives.all_gather(x.values, sp, wait=False)
        if needs_x:
            grad_x_work = _sum_to_shard(gemm.input_gradient(grad, weight, ctx.dtype), ctx.tp, sp)
        if way is not Way.QUEUE:
            grad_weight = _weight_gradient(way, ctx.gradients, gemm, owner, grad, x._replace(values=x_work.wait()))
        elif needs_weight:
            # Gathered when its time comes: until then the shard is enough.
            grad_view, x = ctx.gradients.grad_view, x.without_graph()
            ctx.gradients.hand_in(
                owner, lambda: gemm.add_weight_gradient(owner, grad, _gathered(x, sp), grad_view(owner))
            )
        if needs_bias:
            grad_bias = grad_TO.sum(0).view(weight.shape[:-1]).to(weight.dtype)
        if needs_x:
            grad_x = grad_x_work.wait()
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tp: Axis,
        sp: Axis,
        gradients: WeightGradients,
        gemm: Gemm,
        is_training: bool,
    ) -> Tensor:
        ctx.sp, ctx.gradients, ctx.gemm, ctx.dtype = sp, gradients, gemm, x.dtype
        ctx.owner = weight
        kept = gemm.cast_input(x, is_training=is_training)
        _keep(ctx, kept, weight)
        y_TO = _sum_to_shard(gemm.forward(kept, weight, None, x.dtype, is_training=is_training), tp, sp).wait()
        # Before the sum, tp ranks would add it tp times.
        return y_TO if bias is None else y_TO.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = _kept(ctx)
        gemm: Gemm = ctx.gemm
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_weight = None
        own = gemm.cast_gradient(grad)
        grad_work = collectives.all_gather(own.values, ctx.sp, wait=False)
        # Of this rank's tokens alone: under sequence parallelism a part of a sum.
        grad_bias = grad.sum(0).to(weight.dtype) if needs_bias else None
        whole = own._replace(values=grad_work.wait())
        grad_x = gemm.input_gradient(whole, weight, ctx.dtype) if needs_x else None
        if needs_weight:
            owner: Tensor = ctx.owner
            way = ctx.gradients.way(owner)
            if way is Way.QUEUE:
                grad_view, x = ctx.gradients.grad_view, x.without_graph()
                ctx.gradients.hand_in(owner, lambda: gemm.add_weight_gradient(owner, whole, x, grad_view(owner)))
            else:
                grad_weight = _weight_gradient(way, ctx.gradients, gemm, owner, whole, x)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _keep(ctx: Any, x: Operand, weight: Tensor) -> None:
    """Keeps the input for backward, where the weight will want it, and the weight."""
    ctx.save_for_backward(*(x if ctx.needs_input_grad[1] else (None, None)), weight)


def _kept(ctx: Any) -> tuple[Operand, Tensor]:
    values, inverse_scale, weight = ctx.saved_tensors
    return Operand(values, inverse_scale), weight


def _gathered(x: Operand, sp: Axis) -> Operand:
    return x._replace(values=collectives.all_gather(x.values, sp))


def _weight_gradient(
    way: Way, gradients: WeightGradients, gemm: Gemm, weight: Tensor, grad_TO: Operand, x_TI: Operand
) -> Tensor | None:
    """What autograd is to get: the gradient of the weight, or nothing where it has gone to `.grad` already."""
    if way is Way.ADD:
        gemm.add_weight_gradient(weight, grad_TO, x_TI, gradients.grad_view(weight))
        return None
    return gemm.weight_gradient(grad_TO, x_TI, weight)


def _sum_to_shard(part: Tensor, tp: Axis, sp: Axis) -> Pending:
    """The sum over `tp` of `part`, which it may overwrite: under sequence parallelism this rank's T/sp tokens of it."""
    if sp.size == tp.size:
        return collectives.reduce_scatter(part, sp, wait=False)
    return collectives.all_reduce_(part, tp, wait=False)
