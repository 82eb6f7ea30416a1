"""One tensor to float8 and back: the two formats, the scale that brings a tensor into their range, the cast.

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

# Below it a tensor is as good as zero: largest / amax stays a number.
_SMALLEST = 2.0**-100
_EXPONENT_BITS = 0x7F800000


class Operand(NamedTuple):
    """One side of a product, in the form in which it travels and is kept for backward."""

    values: Tensor
    """The tensor itself, or the bytes (uint8) of its float8 values: collectives know no float8."""
    inverse_scale: Tensor | None
    """float32 []: what float8 values are to be multiplied by; none for the tensor itself."""

    def without_graph(self) -> "Operand":
        """As a product that is put off may hold it: a saved tensor has its graph with it, and that what the stage
        received, and its gradient."""
        return self._replace(values=self.values.detach())


def largest(dtype: torch.dtype) -> float:
    """The largest finite number of a format."""
    return torch.finfo(dtype).max


def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude in a tensor, float32 []; NaN where there is one, 0 for a tensor of no elements."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    amax: Tensor = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    return amax


def scale_of(amax: Tensor, largest_value: float | Tensor, margin: int) -> Tensor:
    """The scales of tensors with these amaxes, float32 of their shape; 0 for an infinite one."""
    ratio = largest_value / amax.clamp(min=_SMALLEST)
    # Of a float32 only its sign and exponent are left: the power of two below it.
    power = (ratio.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return power * 2.0**-margin


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes (uint8) of `x * scale` in a float8 format; what is beyond its range becomes its largest number."""
    # e5m2 would make infinities of what is beyond.
    limit = largest(dtype)
    return (x * scale).clamp_(-limit, limit).to(dtype).contiguous().view(torch.uint8)
