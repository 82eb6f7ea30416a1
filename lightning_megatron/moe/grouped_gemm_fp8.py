"""GEMMs of many experts in float8: one after another, each as that of a dense linear.

The rows of all own experts share one scale, and so do the gradients. Weights have a scale per expert under current
scaling, and one for all of them under delayed scaling.

R rows sorted by expert, L own experts, I features in, O features out.
"""

import torch
from torch import Tensor

from lightning_megatron.moe.grouped_gemm import ExpertGroups
from lightning_megatron.precision.cast import Operand
from lightning_megatron.precision.gemm import Fp8Gemm
from lightning_megatron.precision.scaling import Scaling
from lightning_megatron.tensor.weight_gradients import add_gradient


class GroupedFp8Gemm:
    """GEMM in float8; caches the cast weights until `forget`, for all microbatches of a step."""

    def __init__(self, num_own: int, *, x: Scaling, weight: Scaling, gradient: Scaling) -> None:
        self._x, self.weight_scaling, self._gradient = x, weight, gradient
        self._of_experts = [Fp8Gemm(x=x, weight=weight, gradient=gradient) for _ in range(num_own)]

    def cast_anew(self) -> None:
        """Casts weights in each GEMM from here on, and holds no cast of them in between."""
        for gemm in self._of_experts:
            gemm.cast_anew()

    def forget(self) -> None:
        """Drops the cast weights, as they change: the next GEMM casts them anew."""
        for gemm in self._of_experts:
            gemm.forget()

    def cast_input(self, x_RI: Tensor, *, is_training: bool) -> Operand:
        return self._x.cast(x_RI, is_training=is_training)

    def cast_gradient(self, grad_RO: Tensor) -> Operand:
        return self._gradient.cast(grad_RO, is_training=True)

    def forward(
        self, x_RI: Operand, weight: Tensor, groups: ExpertGroups, dtype: torch.dtype, *, is_training: bool
    ) -> Tensor:
        if is_training:
            # Experts without rows too: the scales of later steps must not depend on routing.
            for gemm, of_expert in zip(self._of_experts, weight, strict=True):
                gemm.cast_weight(of_expert, is_training=True)
        y_RO = x_RI.values.new_empty(len(x_RI.values), weight[0].numel() // weight.shape[-1], dtype=dtype)
        for expert, rows in groups.spans():
            gemm, x = self._of_experts[expert], _part(x_RI, rows)
            y_RO[rows] = gemm.forward(x, weight[expert], None, dtype, is_training=is_training)
        return y_RO

    def input_gradient(self, grad_RO: Operand, weight: Tensor, groups: ExpertGroups, dtype: torch.dtype) -> Tensor:
        grad_RI = grad_RO.values.new_empty(len(grad_RO.values), weight.shape[-1], dtype=dtype)
        for expert, rows in groups.spans():
            gemm = self._of_experts[expert]
            grad_RI[rows] = gemm.input_gradient(_part(grad_RO, rows), weight[expert], dtype)
        return grad_RI

    def weight_gradient(self, grad_RO: Operand, x_RI: Operand, weight: Tensor, groups: ExpertGroups) -> Tensor:
        shape = (len(weight), weight[0].numel() // weight.shape[-1], weight.shape[-1])
        # float32, the widest that `.grad` may be.
        grad_LOI = weight.new_zeros(shape, dtype=torch.float32)
        for expert, rows in groups.spans():
            gemm = self._of_experts[expert]
            grad_LOI[expert] = gemm.gradient_in(torch.float32, _part(grad_RO, rows), _part(x_RI, rows))
        return grad_LOI

    def add_weight_gradient(
        self, weight: Tensor, grad_RO: Operand, x_RI: Operand, groups: ExpertGroups, grad_view: Tensor | None
    ) -> None:
        add_gradient(weight, self.weight_gradient(grad_RO, x_RI, weight, groups), grad_view)


def _part(operand: Operand, rows: slice) -> Operand:
    return operand._replace(values=operand.values[rows])
