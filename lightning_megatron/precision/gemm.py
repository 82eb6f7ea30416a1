"""The three GEMMs of a linear layer as a value: the one that a layer holds decides how it multiplies.

    forward  y = x W^T        input gradient  dx = dy W        weight gradient  dW = dy^T x

`Fp8Gemm` does each as torch's scaled GEMM of float8 operands; on a CPU, which has none, of their numbers in float32.
That wants the inner dim last on both sides, so the backward GEMMs transpose: the weight once a step, gradient and input
each time. Inner dims are multiples of a tile: features are so by rule, tokens are padded with zeros. Dims: T tokens, I
features in, O features out.
"""

from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron.precision.cast import Operand
from lightning_megatron.precision.mx import multiply_blocks
from lightning_megatron.precision.scaling import Scaling


class Gemm(Protocol):
    """The GEMMs of a linear layer. Operands come from `cast_input` and `cast_gradient`, gathered or not."""

    def cast_input(self, x_TI: Tensor, *, is_training: bool) -> Operand:
        """The input as it is sent between ranks and saved for backward."""
        ...

    def cast_gradient(self, grad_TO: Tensor) -> Operand:
        """The gradient of the output as it is sent between ranks."""
        ...

    def forward(
        self, x_TI: Operand, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, is_training: bool
    ) -> Tensor:
        """x W^T + b, [T, O] in `dtype`; weight and bias may have more dims than two and one."""
        ...

    def input_gradient(self, grad_TO: Operand, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """dy W, [T, I] in `dtype`."""
        ...

    def weight_gradient(self, grad_TO: Operand, x_TI: Operand, weight: Tensor) -> Tensor:
        """dy^T x in the weight's shape and dtype."""
        ...

    def add_weight_gradient(self, weight: Tensor, grad_TO: Operand, x_TI: Operand, grad_view: Tensor | None) -> None:
        """Adds dy^T x to the weight's `.grad`, which becomes `grad_view` where there is none yet."""
        ...


class CastWeight:
    """A weight in float8, and its transpose once it was needed."""

    def __init__(self, weight: Tensor, operand_OI: Operand, scaling: Scaling) -> None:
        self.rows = scaling.rows(operand_OI)
        self._operand_OI, self._scaling = operand_OI, scaling
        self._version, self._data_ptr = weight._version, weight.data_ptr()
        self._columns: Operand | None = None

    def is_of(self, weight: Tensor) -> bool:
        """Whether the weight is unchanged since the cast, as far as torch counts changes in place."""
        return self._version == weight._version and self._data_ptr == weight.data_ptr()

    @property
    def columns(self) -> Operand:
        """The transposed weight, made at first use."""
        if self._columns is None:
            self._columns = self._scaling.columns(self._operand_OI)
        return self._columns


class Fp8Gemm:
    """Multiplies in float8; caches the cast weight until `forget`, for all microbatches of a step."""

    def __init__(self, *, x: Scaling, weight: Scaling, gradient: Scaling) -> None:
        self._x, self.weight_scaling, self._gradient = x, weight, gradient
        self._cached: CastWeight | None = None
        self._caches = True

    def cast_anew(self) -> None:
        """Casts the weight in each GEMM from here on, and holds no cast of it in between."""
        self._cached, self._caches = None, False

    def forget(self) -> None:
        """Drops the cached weight, because it changes: the next GEMM casts it anew."""
        self._cached = None

    def cast_input(self, x_TI: Tensor, *, is_training: bool) -> Operand:
        return self._x.cast(x_TI, is_training=is_training)

    def cast_gradient(self, grad_TO: Tensor) -> Operand:
        return self._gradient.cast(grad_TO, is_training=True)

    def forward(
        self, x_TI: Operand, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, is_training: bool
    ) -> Tensor:
        weight_OI = self.cast_weight(weight, is_training=is_training).rows
        # Fast accumulation is enough in forward; rounding errors of backward would add up over steps.
        y_TO = _multiply(self._x.rows(x_TI), self._x.dtype, weight_OI, self.weight_scaling.dtype, dtype, is_fast=True)
        return y_TO if bias is None else y_TO.add_(bias.flatten())

    def input_gradient(self, grad_TO: Operand, weight: Tensor, dtype: torch.dtype) -> Tensor:
        weight_IO = self.cast_weight(weight, is_training=True).columns
        return _multiply(
            self._gradient.rows(grad_TO), self._gradient.dtype, weight_IO, self.weight_scaling.dtype, dtype
        )

    def weight_gradient(self, grad_TO: Operand, x_TI: Operand, weight: Tensor) -> Tensor:
        return self.gradient_in(weight.dtype, grad_TO, x_TI).view(weight.shape)

    @torch.no_grad()
    def add_weight_gradient(self, weight: Tensor, grad_TO: Operand, x_TI: Operand, grad_view: Tensor | None) -> None:
        if weight.grad is None and grad_view is not None:
            grad_view.copy_(self.gradient_in(grad_view.dtype, grad_TO, x_TI).view(weight.shape))
            weight.grad = grad_view
        elif weight.grad is None:
            # With `grad_dtype` a parameter's gradients are wider than itself.
            dtype = weight.grad_dtype if weight.grad_dtype is not None else weight.dtype
            weight.grad = self.gradient_in(dtype, grad_TO, x_TI).view(weight.shape)
        else:
            weight.grad.add_(self.gradient_in(weight.grad.dtype, grad_TO, x_TI).view(weight.shape))

    def gradient_in(self, dtype: torch.dtype, grad_TO: Operand, x_TI: Operand) -> Tensor:
        """dy^T x, [O, I] in `dtype`."""
        grad_OT, x_IT = self._gradient.columns(grad_TO), self._x.columns(x_TI)
        return _multiply(grad_OT, self._gradient.dtype, x_IT, self._x.dtype, dtype)

    def cast_weight(self, weight: Tensor, *, is_training: bool) -> CastWeight:
        """The weight in float8. Outside of training it is cast anew, because between steps weights are replaced in ways
        that torch does not count."""
        if is_training and self._cached is not None and self._cached.is_of(weight):
            return self._cached
        operand_OI = self.weight_scaling.cast(weight.detach().flatten(0, -2), is_training=is_training)
        cast = CastWeight(weight, operand_OI, self.weight_scaling)
        if is_training and self._caches:
            self._cached = cast
        return cast


def _multiply(
    left_MK: Operand,
    left_dtype: torch.dtype,
    right_NK: Operand,
    right_dtype: torch.dtype,
    dtype: torch.dtype,
    *,
    is_fast: bool = False,
) -> Tensor:
    """left right^T, [M, N] in `dtype`."""
    assert left_MK.inverse_scale is not None and right_NK.inverse_scale is not None
    if left_MK.inverse_scale.dim():
        return multiply_blocks(left_MK, left_dtype, right_NK, right_dtype, dtype)
    left, right = left_MK.values.view(left_dtype), right_NK.values.view(right_dtype).t()
    if left.device.type == "cpu":
        # On CPUs with units for matrices of other dtypes torch's own kernel goes number by number.
        return left.float().mm(right.float()).mul_(left_MK.inverse_scale * right_NK.inverse_scale).to(dtype)
    product: Tensor = torch._scaled_mm(
        left,
        right,
        scale_a=left_MK.inverse_scale,
        scale_b=right_NK.inverse_scale,
        out_dtype=dtype,
        use_fast_accum=is_fast,
    )
    return product
