"""What float8 operands stand for, for comparison with products in float32."""

import torch
from torch import Tensor

from lightning_megatron.precision.cast import Operand


def decast(operand: Operand, dtype: torch.dtype) -> Tensor:
    """The float32 tensor that a float8 operand stands for."""
    assert operand.inverse_scale is not None
    return operand.values.view(dtype).float() * operand.inverse_scale
