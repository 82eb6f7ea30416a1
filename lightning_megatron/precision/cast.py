"""Casts to float8: the two formats, the scale that brings a tensor into their range, the cast.

    scale = 2^floor(log2(largest / amax)) / 2^margin        values = round(x * scale)        x is about values / scale

amax is the largest magnitude in the tensor, `largest` that of the format. Note: scales are powers of two. Multiplying
by one rounds nothing, so a bf16 tensor is cast in its own dtype and is rounded once; the format loses no precision by
it, only up to one of its binades. Source: Micikevicius et al., arXiv 2209.05433 (formats, per-tensor scaling).
"""

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

TILE = 16
"""Number that must divide the inner and the last dim of a float8 GEMM."""

# An amax below it counts as this much, so that largest / amax stays finite.
_SMALLEST = 2.0**-100
_EXPONENT_BITS = 0x7F800000


class Operand(NamedTuple):
    """One operand of a GEMM, in the form that is sent between ranks and saved for backward."""

    values: Tensor
    """The tensor itself, or the bytes (uint8) of its float8 values: collectives know no float8."""
    inverse_scale: Tensor | None
    """Factor by which float8 values are multiplied, float32 [], or bytes (E8M0) of the factors of their blocks, uint8;
    None for the tensor itself."""

    def without_graph(self) -> "Operand":
        """The operand for a split-off weight gradient: a saved tensor would keep its graph alive, and with it the
        stage's input and its gradient."""
        return self._replace(values=self.values.detach())


def largest(dtype: torch.dtype) -> float:
    """The largest finite number of a format."""
    return torch.finfo(dtype).max


def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude in a tensor, float32 []; NaN where there is one, 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    amax: Tensor = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    return amax


def scale_of(amax: Tensor, largest_value: float | Tensor, margin: int) -> Tensor:
    """The scales of tensors with these amaxes, float32 of their shape; 0 for an infinite one."""
    ratio = largest_value / amax.clamp(min=_SMALLEST)
    # A float32 of which only sign and exponent are left is the power of two below it.
    power = (ratio.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return power * 2.0**-margin


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes (uint8) of `x * scale` in a float8 format, saturated at its largest number."""
    # A cast to e5m2 alone would make infinities of values beyond its range.
    limit = largest(dtype)
    return (x * scale).clamp_(-limit, limit).to(dtype).contiguous().view(torch.uint8)
