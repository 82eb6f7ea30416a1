"""What a step is compared by, in the order in which a step makes it, and how far two values of it are apart."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

INITIAL = "initial weights"
BATCH = "batch"
LOSS = "loss"
LOGGED = "logged"
GRADIENT = "gradient"
NORM = "norm"
CLIPPED = "stepped by"
BUFFERS = "buffers"
WEIGHTS = "weights"
VALIDATION = "validation"
CALLBACK = "callbacks"

QUANTITIES = (INITIAL, BATCH, LOSS, LOGGED, GRADIENT, NORM, CLIPPED, BUFFERS, WEIGHTS, VALIDATION, CALLBACK)
"""Quantities in the order of a step."""

NUMBERS = frozenset({LOSS, LOGGED, NORM, VALIDATION, CALLBACK})
"""Quantities that are numbers, which every rank has."""

MEANINGS = {
    INITIAL: "weights and buffers before the first step",
    BATCH: "the batch that reaches training_step",
    LOSS: "the loss of the step",
    LOGGED: "what loggers and the progress bar get in training",
    GRADIENT: "the gradient of every parameter, before hooks and clipping",
    NORM: "the norm of the whole gradient",
    CLIPPED: "every gradient that the optimizer steps by, after hooks and clipping",
    BUFFERS: "the buffers after the step and its hooks",
    WEIGHTS: "the weights after the step and its hooks",
    VALIDATION: "what loggers get in validation",
    CALLBACK: "trainer.callback_metrics, which callbacks see",
}
"""What each is, for a reader."""

# A tensor whose values are this much smaller than the largest of its kind may be nothing but rounding.
_SMALLEST_SCALE = 1e-3
# A ratio is one factor if it varies by less than this over a tensor.
_SAME_FACTOR = 1e-4


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One value of a step of one rank beside that of one device."""

    quantity: str
    step: int
    """Number of the step, from 1; 0 is before the first."""
    name: str
    rank: int
    relative: float
    """Largest difference, relative to the largest value of the tensor on one device."""
    ours: float
    theirs: float
    """The two values at the largest difference: of the rank, and of one device."""
    factor: float | None = None
    """The one number by which all of one device's values were multiplied; None where there is none."""
    digest: int = 0
    """Hash of the rank's values, which ranks with copies of one tensor share."""
    box: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Part of the whole tensor that the rank has."""


def scale_of(tensors: dict[str, Tensor]) -> float:
    """The largest magnitude in several tensors, 0 for none."""
    return max((magnitude(tensor) for tensor in tensors.values()), default=0.0)


def magnitude(tensor: Tensor) -> float:
    """The largest magnitude in a tensor; 0 for an empty one and for one of NaN."""
    if not tensor.numel():
        return 0.0
    largest = _double(tensor).abs().max().item()
    return float(largest) if math.isfinite(largest) else 0.0


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def apart(ours: Tensor, theirs: Tensor, largest: float) -> tuple[float, float, float, float | None]:
    """Relative deviation of two tensors, the two values where it is largest, and the factor between them if it is one.

    `largest` is the magnitude of all tensors of the kind.
    """
    if ours.shape != theirs.shape:
        return math.inf, math.nan, math.nan, None
    if not ours.numel():
        return 0.0, 0.0, 0.0, None
    a, b = _double(ours).reshape(-1), _double(theirs).reshape(-1)
    # NaN beside NaN is no difference.
    difference = torch.where(a.isnan() & b.isnan() | (a == b), 0.0, (a - b).abs().nan_to_num(nan=math.inf))
    index = int(difference.argmax())
    scale = max(magnitude(theirs), _SMALLEST_SCALE * largest) or 1.0
    return difference[index].item() / scale, _real(a[index]), _real(b[index]), _factor(a, b)


def _real(value: Tensor) -> float:
    return float(value.abs() if value.is_complex() else value)


def _factor(a: Tensor, b: Tensor) -> float | None:
    if a.is_complex():
        return None
    counts = b.abs() > _SMALLEST_SCALE * magnitude(b)
    if not bool(counts.any()):
        return None
    ratios = a[counts] / b[counts]
    middle = ratios.median().item()
    if not math.isfinite(middle) or (ratios - middle).abs().max().item() > _SAME_FACTOR * max(abs(middle), 1e-12):
        return None
    return float(middle)
