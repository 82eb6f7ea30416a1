"""GEMMs of a linear layer in the dtype of its activations, by torch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.precision.cast import Operand
from lightning_megatron.precision.gemm import Gemm
from lightning_megatron.tensor.weight_gradients import add_product, product_in


class TorchGemm:
    """GEMM of the tensors as they are; parameters take the activations' dtype under autocast."""

    def cast_input(self, x_TI: Tensor, *, is_training: bool) -> Operand:
        return Operand(x_TI, None)

    def cast_gradient(self, grad_TO: Tensor) -> Operand:
        return Operand(grad_TO, None)

    def forward(
        self, x_TI: Operand, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, is_training: bool
    ) -> Tensor:
        x = x_TI.values
        return F.linear(x, _as(x, weight).flatten(0, -2), _as(x, bias, flat=True))

    def input_gradient(self, grad_TO: Operand, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return grad_TO.values.mm(_as(grad_TO.values, weight).flatten(0, -2))

    def weight_gradient(self, grad_TO: Operand, x_TI: Operand, weight: Tensor) -> Tensor:
        return product_in(weight.dtype, grad_TO.values.t(), x_TI.values).view(weight.shape)

    def add_weight_gradient(self, weight: Tensor, grad_TO: Operand, x_TI: Operand, grad_view: Tensor | None) -> None:
        add_product(weight, grad_TO.values.t(), x_TI.values, grad_view)


TORCH_GEMM: Gemm = TorchGemm()
"""The GEMM of all layers outside float8; it is stateless."""


def _as(x: Tensor, parameter: Any, *, flat: bool = False) -> Any:
    """A parameter in the dtype of `x` under autocast.

    It is cast inside the Functions, once a direction: a cast outside would be saved for backward by every microbatch in
    flight, a copy of all weights each.
    """
    if parameter is None:
        return None
    cast = parameter.to(x.dtype) if x.dtype != parameter.dtype and parameter.dtype != torch.float64 else parameter
    return cast.flatten() if flat else cast
