"""Linear layers whose weight is cut over `tp`: by its outputs (column) or by its inputs (row).

Take y = x W^T + b on p ranks. A column-parallel layer gives rank i some outputs, a row-parallel layer some inputs:

    column   W = [W_1; ...; W_p], W_i [O/tp, I]    y = [y_1, ..., y_p]     y_i = x W_i^T + b_i
    row      W = [W_1, ..., W_p], W_i [O, I/tp]    x = [x_1, ..., x_p]     y = x_1 W_1^T + ... + x_p W_p^T + b

A column layer followed by a row layer (attention and the MLP are one of each) needs no communication in between: the
columns y_i are what the row layer wants as x_i. So the column layer opens a tensor-parallel region, where features are
cut, and the row layer closes it by a sum. Under sequence parallelism `sp` is `tp`: outside of the region a rank holds
T/sp tokens, which the column layer all-gathers and the row layer's reduce-scatter hands out again; otherwise `sp` has
size 1. With G for the all-gather over sp and S for the sum over tp (reduce-scattered to T/sp tokens under sp):

                      column                         row
    forward           y_i = G(x) W_i^T + b_i         y = S(x_i W_i^T) + b
    input gradient    dx = S(dy_i W_i)               dx_i = G(dy) W_i
    weight gradient   dW_i = dy_i^T G(x)             dW_i = G(dy)^T x_i
    bias gradient     db_i = sum of dy_i over T      db = sum of dy over T/sp, summed over sp at the end of the step

The backward transposes the forward, so each collective becomes its conjugate: what the forward gathers the backward
sums and scatters, and the reverse. All ranks read x in a column layer, so the gradients of all of them add up in dx.
In a row layer each x_i takes part in every output, so its rank needs all of dy and sums nothing.

How a layer multiplies is its `gemm`; what travels and is saved for backward is the operand that the gemm cast.
T tokens, I features in, O features out.
Source: Narayanan et al., arXiv 2104.04473, section 2.3; Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_megatron.comm import chunked_collectives, collectives, symmetric_memory
from lightning_megatron.comm.chunked_collectives import Compute
from lightning_megatron.comm.collectives import Pending
from lightning_megatron.mesh import Axis
from lightning_megatron.precision.autocast import autocast_dtype
from lightning_megatron.precision.cast import Operand
from lightning_megatron.precision.gemm import Gemm
from lightning_megatron.sharding import Fused, Initial, shard_parameter
from lightning_megatron.tensor.compiled_gradients import add_compiled_product
from lightning_megatron.tensor.gemm import TORCH_GEMM
from lightning_megatron.tensor.weight_gradients import (
    StandIn,
    WeightGradientLayer,
    WeightGradientMode,
    WeightGradients,
)


class TokenKeys(Protocol):
    """Random keys of a stream of tokens, which determine their dropout masks."""

    @property
    def shard_keys(self) -> Tensor:
        """Keys of this rank's part of the stream: int64 [T/sp]."""
        ...

    @property
    def stream_keys(self) -> Tensor:
        """Keys of the full stream: int64 [T]."""
        ...


class ParallelLinear(WeightGradientLayer):
    """A linear layer over `tp` that multiplies by its `gemm`.

    `lora`, if any, is a LoRA adapter (`tensor.lora_adapter`): it gets the same input and the keys of its tokens, and
    its output is added. The forward's message under sequence parallelism goes in `num_chunks`, or is fused with the
    product where `is_symmetric`.
    """

    names_stood_in = ("weight",)
    weight: nn.Parameter
    bias: nn.Parameter | None
    lora: nn.Module | None

    def __init__(self, tp: Axis, sp: Axis, *, input_axis: Axis, gradient_axis: Axis) -> None:
        super().__init__()
        self.tp, self.sp = tp, sp
        # The axes whose ranks hold parts of the input, and of the gradient of the output; of size 1 where replicated.
        self.input_axis, self.gradient_axis = input_axis, gradient_axis
        self.gemm: Gemm = TORCH_GEMM
        self.num_chunks = 1
        self.is_symmetric = False
        self.lora = None

    def _output(self, product: Callable[..., Tensor], x_TI: Tensor, tokens: TokenKeys | None) -> Tensor:
        """What `product` makes of the input and this layer's weights, with the adapter's output, if any."""
        y_TO = product(
            x_TI,
            self.weight,
            self.bias,
            stand_in=self.stand_ins.get("weight"),
            tp=self.tp,
            sp=self.sp,
            gradients=self.weight_gradients,
            gemm=self.gemm,
            num_chunks=self.num_chunks,
            is_symmetric=self.is_symmetric,
        )
        return y_TO if self.lora is None else y_TO + self.lora(x_TI, tokens)


class ColumnParallelLinear(ParallelLinear):
    """Column-parallel linear, [T/sp, in_features] to [T, *out_shape], cut over `tp` along dim `cut` of `out_shape`."""

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
        fused: Fused | None = None,
    ) -> None:
        super().__init__(tp, sp, input_axis=sp, gradient_axis=tp)
        shape = (out_shape,) if isinstance(out_shape, int) else out_shape
        dim = cut % len(shape)
        self.weight = shard_parameter((*shape, in_features), initial=initial, dim=dim, axis=tp, fused=fused)
        self.bias = shard_parameter(shape, initial=Initial(), dim=dim, axis=tp) if bias else None

    def forward(self, x_TI: Tensor, tokens: TokenKeys | None = None) -> Tensor:
        return self._output(column_parallel_linear, x_TI, tokens)


class RowParallelLinear(ParallelLinear):
    """Row-parallel linear, [T, in_features/tp] to [T/sp, out_features]; the bias is replicated over `tp`."""

    def __init__(
        self, in_features: int, out_features: int, *, tp: Axis, sp: Axis, bias: bool, initial: Initial
    ) -> None:
        super().__init__(tp, sp, input_axis=tp, gradient_axis=sp)
        self.weight = shard_parameter((out_features, in_features), initial=initial, dim=1, axis=tp)
        self.bias = shard_parameter((out_features,), initial=Initial(), replicas=(tp,), partial=sp) if bias else None

    def forward(self, x_TI: Tensor, tokens: TokenKeys | None = None) -> Tensor:
        return self._output(row_parallel_linear, x_TI, tokens)


def column_parallel_linear(
    x_TI: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    tp: Axis,
    sp: Axis,
    gradients: WeightGradients,
    gemm: Gemm = TORCH_GEMM,
    num_chunks: int = 1,
    is_symmetric: bool = False,
    stand_in: StandIn | None = None,
) -> Tensor:
    """Column-parallel product [T, *weight.shape[:-1]] of [T/sp, I] and a weight, which may be tied to another layer.

    The gradient of the weight goes where `gradients` says, or to its stand-in (`compiled_gradients`). Only the
    T/sp tokens are saved for backward, which gathers them once more.
    """
    x_TI = as_gemm_input(x_TI)
    call = _Call(tp, sp, gradients, gemm, num_chunks, is_symmetric, torch.is_grad_enabled())
    y_TO: Tensor = _Column.apply(x_TI, *_differentiated(weight, stand_in), bias, call)
    # Outside of the Function: autograd forbids in-place changes of a view that a Function made.
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
    num_chunks: int = 1,
    is_symmetric: bool = False,
    stand_in: StandIn | None = None,
) -> Tensor:
    """Row-parallel product [T/sp, O] of [T, I/tp] and a weight [O, I/tp]; the bias is added after the sum over `tp`."""
    x_TI = as_gemm_input(x_TI)
    call = _Call(tp, sp, gradients, gemm, num_chunks, is_symmetric, torch.is_grad_enabled())
    y_TO: Tensor = _Row.apply(x_TI, *_differentiated(weight_OI, stand_in), bias_O, call)
    return y_TO


def _differentiated(weight: Tensor, stand_in: StandIn | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The weight, its anchor and its handle, of which the weight or the anchor is differentiated."""
    return (weight, None, None) if stand_in is None else (weight.detach(), *stand_in)


def as_gemm_input(x: Tensor) -> Tensor:
    """`x` in the dtype of the GEMM: autocast's, if it is on, except for float64."""
    dtype = autocast_dtype(x)
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)


class _Call(NamedTuple):
    """Arguments of a linear's Function besides its tensors."""

    tp: Axis
    sp: Axis
    gradients: WeightGradients
    gemm: Gemm
    num_chunks: int
    is_symmetric: bool
    """Whether symmetric memory fuses the forward's product with its message."""
    is_training: bool
    """Whether gradients are on outside of the Function: inside they are off."""


# Note: a weight is its owner. Where hooks handle saved tensors (recomputation, offloading), a saved weight comes back
# as another tensor, and a gradient put on that one would be lost. `ctx.owner` is the weight itself.
class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        anchor: Tensor | None,
        handle: Tensor | None,
        bias: Tensor | None,
        call: _Call,
    ) -> Tensor:
        ctx.call, ctx.owner, ctx.handle, ctx.dtype = call, weight, handle, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        saved = call.gemm.cast_input(x, is_training=call.is_training)
        _save_for_backward(ctx, saved, weight)
        if call.is_symmetric and call.sp.size > 1:
            y_TO = symmetric_memory.gathered_product(saved.values, _right(saved.values, weight), call.sp)
            return y_TO if bias is None else y_TO + bias.to(y_TO.dtype).flatten()
        product = _product(call, saved, weight, bias, x.dtype)
        return chunked_collectives.compute_on_gathered(saved.values, call.sp, call.num_chunks, product)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        # Note: overlap. The gather of x is hidden by the input's gradient; the sum of that gradient is hidden by the
        # gradients of weight and bias.
        x, weight = _saved(ctx)
        call: _Call = ctx.call
        tp, sp, gradients, gemm, *_ = call
        needs_x, _, _, _, needs_bias, _ = ctx.needs_input_grad
        needs_weight = _needs_weight(ctx)
        grad_x = grad_weight = grad_bias = None
        grad = gemm.cast_gradient(grad_TO)
        owner: Tensor = ctx.owner
        mode = _mode(ctx) if needs_weight else WeightGradientMode.DEFER
        if mode is not WeightGradientMode.DEFER:
            x_work = collectives.all_gather(x.values, sp, wait=False)
        if needs_x:
            grad_x_work = sum_to_shard(gemm.input_gradient(grad, weight, ctx.dtype), tp, sp)
        if mode is not WeightGradientMode.DEFER:
            grad_weight = _weight_gradient(ctx, mode, grad, x._replace(values=x_work.wait()))
        elif needs_weight:
            # A deferred weight gradient gathers x when it runs: until then it holds the shard alone.
            x = x.without_graph()
            gradients.defer(
                owner, lambda: gemm.add_weight_gradient(owner, grad, _gathered(x, sp), gradients.grad_view(owner))
            )
        if needs_bias:
            grad_bias = grad_TO.sum(0, dtype=ctx.bias_dtype).view(weight.shape[:-1])
        if needs_x:
            grad_x = grad_x_work.wait()
        return grad_x, *((grad_weight, None) if ctx.handle is None else (None, grad_weight)), None, grad_bias, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        anchor: Tensor | None,
        handle: Tensor | None,
        bias: Tensor | None,
        call: _Call,
    ) -> Tensor:
        ctx.call, ctx.owner, ctx.handle, ctx.dtype = call, weight, handle, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        saved = call.gemm.cast_input(x, is_training=call.is_training)
        _save_for_backward(ctx, saved, weight)
        product = _product(call, saved, weight, None, x.dtype)
        if call.is_symmetric and call.sp.size > 1:
            y_TO = symmetric_memory.scattered_product(saved.values, _right(saved.values, weight), call.sp)
        elif call.sp.size == call.tp.size:
            y_TO = chunked_collectives.scatter_computed(saved.values, call.sp, call.num_chunks, product)
        else:
            y_TO = collectives.all_reduce_(product(saved.values), call.tp)
        # Before the sum, tp ranks would add the bias tp times.
        return (y_TO if bias is None else y_TO.add_(bias)).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = _saved(ctx)
        call: _Call = ctx.call
        sp, gradients, gemm = call.sp, call.gradients, call.gemm
        needs_x, _, _, _, needs_bias, _ = ctx.needs_input_grad
        needs_weight = _needs_weight(ctx)
        grad_weight = None
        own = gemm.cast_gradient(grad)
        grad_work = collectives.all_gather(own.values, sp, wait=False)
        # Under sequence parallelism this is a partial sum over this rank's tokens.
        grad_bias = grad.sum(0, dtype=ctx.bias_dtype) if needs_bias else None
        full = own._replace(values=grad_work.wait())
        grad_x = gemm.input_gradient(full, weight, ctx.dtype) if needs_x else None
        if needs_weight:
            owner: Tensor = ctx.owner
            mode = _mode(ctx)
            if mode is WeightGradientMode.DEFER:
                x = x.without_graph()
                gradients.defer(owner, lambda: gemm.add_weight_gradient(owner, full, x, gradients.grad_view(owner)))
            else:
                grad_weight = _weight_gradient(ctx, mode, full, x)
        return grad_x, *((grad_weight, None) if ctx.handle is None else (None, grad_weight)), None, grad_bias, None


def _save_for_backward(ctx: Any, x: Operand, weight: Tensor) -> None:
    """Saves the weight for backward, and the input if the weight needs a gradient."""
    ctx.save_for_backward(*(x if _needs_weight(ctx) else (None, None)), weight)


def _needs_weight(ctx: Any) -> bool:
    """Whether the weight needs a gradient, or its anchor."""
    return bool(ctx.needs_input_grad[1] or ctx.needs_input_grad[2])


def _mode(ctx: Any) -> WeightGradientMode:
    return WeightGradientMode.RETURN if ctx.handle is not None else ctx.call.gradients.mode(ctx.owner)


def _saved(ctx: Any) -> tuple[Operand, Tensor]:
    values, inverse_scale, weight = ctx.saved_tensors
    return Operand(values, inverse_scale), weight


def _product(call: _Call, x: Operand, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Compute:
    """The forward's product of rows that are cast as `x` is."""
    return lambda rows: call.gemm.forward(x._replace(values=rows), weight, bias, dtype, is_training=call.is_training)


def _right(x_TI: Tensor, weight: Tensor) -> Tensor:
    """The right factor [I, O] of a product without float8."""
    return weight.to(x_TI.dtype).flatten(0, -2).t()


def _gathered(x: Operand, sp: Axis) -> Operand:
    return x._replace(values=collectives.all_gather(x.values, sp))


def _weight_gradient(ctx: Any, mode: WeightGradientMode, grad_TO: Operand, x_TI: Operand) -> Tensor | None:
    """Gradient of the weight, or of its anchor, for autograd; None where it was added to `.grad` directly."""
    call: _Call = ctx.call
    weight: Tensor = ctx.owner
    if ctx.handle is not None:
        return add_compiled_product(grad_TO.values, x_TI.values, ctx.handle)
    if mode is WeightGradientMode.ADD:
        call.gemm.add_weight_gradient(weight, grad_TO, x_TI, call.gradients.grad_view(weight))
        return None
    return call.gemm.weight_gradient(grad_TO, x_TI, weight)


def sum_to_shard(part: Tensor, tp: Axis, sp: Axis) -> Pending:
    """Starts the sum over `tp` of `part`, which it may overwrite; under sequence parallelism it is scattered."""
    if sp.size == tp.size:
        return collectives.reduce_scatter(part, sp, wait=False)
    return collectives.all_reduce_(part, tp, wait=False)
