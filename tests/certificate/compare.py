"""How far a layout's outcome is from one device's: the largest difference of each quantity over all ranks.

Differences are absolute: losses and norms are at most about 6, gradients and weights about 1, and the counts are exact.
"""

import functools
import math
from typing import Any

import torch

from tests.certificate.cases import LAYOUTS, VARIANTS
from tests.certificate.runs import DTYPES, Outcome, reference, under_layout
from tests.harness.ranks import run_on_ranks

CELLS = [(variant, precision) for variant in VARIANTS for precision in DTYPES]
QUANTITIES = ("loss", "gradients", "norm", "weights", "logged")


@functools.cache
def _outcomes(layout: str) -> list[list[Outcome]] | Exception:
    try:
        return run_on_ranks(LAYOUTS[layout].world, under_layout, LAYOUTS[layout], CELLS, init=False, timeout=240)
    except Exception as error:
        # Kept, so that the other cells of the layout fail at once instead of running into it again.
        return error


def outcomes(layout: str) -> list[list[Outcome]]:
    """[rank][cell]: every variant and precision under one layout, by the same processes one after the other."""
    ran = _outcomes(layout)
    if isinstance(ran, Exception):
        raise ran
    return ran


@functools.cache
def deviations(layout: str, variant: str, precision: str) -> dict[str, float]:
    """The largest difference from one device, by quantity."""
    expected = reference(variant, precision, LAYOUTS[layout])
    cell = CELLS.index((variant, precision))
    found = dict.fromkeys(QUANTITIES, 0.0)
    covered: dict[str, torch.Tensor] = {
        name: torch.zeros(w.shape, dtype=torch.bool) for name, w in expected.weights.items()
    }
    for rank in outcomes(layout):
        for quantity, deviation in _of_rank(rank[cell], expected, covered).items():
            found[quantity] = max(found[quantity], deviation)
    for name, mark in covered.items():
        assert mark.all(), f"no rank held all of {name}"
    return found


def _of_rank(outcome: Outcome, expected: Outcome, covered: dict[str, torch.Tensor]) -> dict[str, float]:
    assert len(outcome.steps) == len(expected.steps)
    found = dict.fromkeys(QUANTITIES, 0.0)
    for step, wanted in zip(outcome.steps, expected.steps, strict=True):
        for loss, wanted_loss in zip(step.losses, wanted.losses, strict=True):
            found["loss"] = max(found["loss"], _apart(loss, wanted_loss))
        found["norm"] = max(found["norm"], _apart(step.norm, wanted.norm))
        assert step.gradients.keys() == outcome.weights.keys(), "a parameter got no gradient"
        for name, part in step.gradients.items():
            found["gradients"] = max(found["gradients"], _difference(part, wanted.gradients[name]))
    for norm, wanted in zip(outcome.norms, expected.steps, strict=False):
        found["norm"] = max(found["norm"], _apart(norm, wanted.norm))
    for name, part in outcome.weights.items():
        found["weights"] = max(found["weights"], _difference(part, expected.weights[name]))
        covered[name][_box(part)] = True
    assert outcome.logged.keys() >= expected.logged.keys()
    for name, value in expected.logged.items():
        found["logged"] = max(found["logged"], _apart(outcome.logged[name], value))
    return found


def _box(part: Any) -> tuple[slice, ...]:
    offsets, tensor = part
    return tuple(slice(start, start + size) for start, size in zip(offsets, tensor.shape, strict=True))


def _difference(part: Any, whole: torch.Tensor) -> float:
    difference = (part[1] - whole[_box(part)]).abs()
    # NaN must not hide behind a maximum.
    assert torch.isfinite(difference).all()
    return difference.max().item() if difference.numel() else 0.0


def _apart(value: float, wanted: float) -> float:
    assert math.isfinite(value)
    return abs(value - wanted)
