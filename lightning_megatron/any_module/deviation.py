"""How far numbers are from those that are meant, in words."""

import math

import torch
from torch import Tensor

from lightning_megatron.precision.autocast import autocast_dtype

# Largest relative deviation that sums in another order explain.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def coarsest(x: Tensor) -> torch.dtype:
    """The dtype that says how exact the numbers of `x` are: under autocast they come from products in its dtype."""
    return autocast_dtype(x) or x.dtype


def tolerance_of(x: Tensor) -> float:
    """The largest deviation of the numbers of `x`, relative to the largest, that sums in another order explain."""
    return _TOLERANCES.get(coarsest(x), 1e-1)


def relative_deviation(found: Tensor, wanted: Tensor, part: float = 1.0) -> str:
    """The deviation relative to the largest value, in words; empty where it is at most this `part` of what sums in
    another order explain."""
    if not wanted.numel():
        return ""
    scale = max(float(wanted.abs().max()), torch.finfo(wanted.dtype).tiny)
    deviation = float((found - wanted).abs().max()) / scale
    if math.isnan(deviation):
        return "no numbers (NaN or Inf)"
    return "" if deviation <= part * tolerance_of(wanted) else f"off by {deviation:.0e} of the largest"
