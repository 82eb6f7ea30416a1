"""How far a layout's outcome is from one device's: the largest difference of each quantity over all ranks.

Differences are absolute: losses and norms are at most about 6, gradients and weights about 1, and the counts are exact.
Of layers with experts it compares what their routers saw in each step, and what they carry on.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.certificate.cases import (
    BAD_STEP,
    HALF_LAYOUTS,
    HALF_ROUNDINGS,
    HALF_ROUNDOFF,
    LAYOUTS,
    NUM_STEPS,
    RATE_DECAY,
    Cell,
    Layout,
    half_variant,
)
from tests.certificate.runs import (
    HALF_REACH,
    SCALES,
    HalfOutcome,
    Outcome,
    Parts,
    half_under_layout,
    reference,
    under_layout,
)
from tests.harness.ranks import run_on_ranks

QUANTITIES = ("loss", "gradients", "norm", "weights", "routing", "logged")
HALF_QUANTITIES = {
    "16-mixed": ("left out", "scale", "one device", "float32"),
    "bf16-mixed": ("one device", "float32"),
}


def outcomes(layout: str, cells: Sequence[Cell], num_steps: int = NUM_STEPS) -> list[list[Outcome]]:
    """What each rank saw, [cell][rank]: every cell under one layout, by the same processes one after the other."""
    own = replace(LAYOUTS[layout], num_steps=num_steps)
    ranks = run_on_ranks(own.world, under_layout, own, list(cells), init=False, timeout=240)
    return [list(cell) for cell in zip(*ranks, strict=True)]


def deviations(layout: str, cell: Cell, ranks: list[Outcome], num_steps: int = NUM_STEPS) -> dict[str, float]:
    """The largest difference of a cell's ranks from one device, by quantity."""
    own = LAYOUTS[layout]
    expected = _expected(*cell, own.rule, own.accumulate, own.clip, own.num_stages > 4, num_steps)
    found = dict.fromkeys(QUANTITIES, 0.0)
    weights, gradients = Covered(expected.weights), [Covered(step.gradients) for step in expected.steps]
    for outcome in ranks:
        for quantity, deviation in _of_rank(outcome, expected, weights, gradients).items():
            found[quantity] = max(found[quantity], deviation)
    for covered in (weights, *gradients):
        covered.require_all()
    shown = {name for outcome in ranks for name in outcome.steps[-1].routing}
    assert shown == expected.steps[-1].routing.keys(), "no rank had some of the routers"
    return found


@functools.cache
def _expected(
    variant: str, precision: str, rule: Any, accumulate: int, clip: float | None, is_deep: bool, num_steps: int
) -> Outcome:
    # As many layers as the stages of the row ask for.
    stages = 8 if is_deep else 1
    layout = Layout(world=1, pp=stages, rule=rule, accumulate=accumulate, clip=clip, num_steps=num_steps)
    return reference(variant, precision, layout)


class Covered:
    """Which elements of each parameter were compared, on any rank."""

    def __init__(self, expected: dict[str, torch.Tensor]) -> None:
        self.marks = {name: torch.zeros(w.shape, dtype=torch.bool) for name, w in expected.items()}

    def add(self, name: str, parts: Parts) -> None:
        """These parts have been compared."""
        for part in parts:
            self.marks[name][_box(part)] = True

    def require_all(self) -> None:
        """Fails where some element was not compared."""
        for name, mark in self.marks.items():
            assert mark.all(), f"no rank held all of {name}"


def _of_rank(outcome: Outcome, expected: Outcome, weights: Covered, gradients: list[Covered]) -> dict[str, float]:
    assert len(outcome.steps) == len(expected.steps)
    found = dict.fromkeys(QUANTITIES, 0.0)
    for step, wanted, covered in zip(outcome.steps, expected.steps, gradients, strict=True):
        for loss, wanted_loss in zip(step.losses, wanted.losses, strict=True):
            found["loss"] = max(found["loss"], _apart(loss, wanted_loss))
        found["norm"] = max(found["norm"], _apart(step.norm, wanted.norm))
        for name, parts in step.gradients.items():
            found["gradients"] = max(found["gradients"], _difference(parts, wanted.gradients[name]))
            covered.add(name, parts)
        for name, value in step.routing.items():
            own = ((0,) * value.dim(), value.double())
            found["routing"] = max(found["routing"], _difference([own], wanted.routing[name].double()))
    for norm, wanted in zip(outcome.norms, expected.steps, strict=False):
        found["norm"] = max(found["norm"], _apart(norm, wanted.norm))
    for name, parts in outcome.weights.items():
        found["weights"] = max(found["weights"], _difference(parts, expected.weights[name]))
        weights.add(name, parts)
    assert outcome.logged.keys() >= expected.logged.keys()
    for name, value in expected.logged.items():
        found["logged"] = max(found["logged"], _apart(outcome.logged[name], value))
    return found


def _box(part: tuple[tuple[int, ...], torch.Tensor]) -> tuple[slice, ...]:
    offsets, tensor = part
    return tuple(slice(start, start + size) for start, size in zip(offsets, tensor.shape, strict=True))


def _difference(parts: Parts, whole: torch.Tensor) -> float:
    largest = 0.0
    for part in parts:
        difference = (part[1] - whole[_box(part)]).abs()
        # NaN must not hide behind a maximum.
        assert torch.isfinite(difference).all()
        largest = max(largest, difference.max().item() if difference.numel() else 0.0)
    return largest


def _apart(value: float, wanted: float) -> float:
    assert math.isfinite(value)
    return abs(value - wanted)


# ----------------------------------------------------------------------------------------------------------------------
# 16 bits


@functools.cache
def _half_outcomes(layout: Layout, variant: str) -> list[dict[str, HalfOutcome]]:
    return run_on_ranks(layout.world, half_under_layout, layout, variant, init=False, timeout=240)


@functools.cache
def _half_reference(variant: str, rule: str, precision: str) -> Outcome:
    """The same steps in float32 in plain torch; the one that float16 leaves out is left out."""
    left_out = (BAD_STEP,) if precision == "16-mixed" else ()
    layout = Layout(world=1, rule=rule)  # type: ignore[arg-type]
    return reference(variant, "32-true", layout, decay=RATE_DECAY, left_out=left_out)


def half_bound(name: str, precision: str, quantity: str) -> float:
    """The largest deviation that rounding explains; none of what a bad step moves, and of the loss scale.

    A number rounded to 16 bits is off by at most u of itself, and n of them, if they are independent, by sqrt(n) u. A
    gradient is off by so much of the largest one, and a weight by as much as all steps make of it.
    """
    if quantity not in HALF_ROUNDINGS:
        return 0.0
    layout = HALF_LAYOUTS[name]
    steps = _half_reference(half_variant(layout), layout.rule, precision).steps
    largest = max(gradient.abs().max().item() for step in steps for gradient in step.gradients.values())
    return math.sqrt(HALF_ROUNDINGS[quantity]) * HALF_ROUNDOFF[precision] * largest * HALF_REACH


@functools.cache
def half_deviations(name: str, precision: str) -> dict[str, float]:
    """By column: what a bad step moved, how far the loss scale was from one device's, and how far the weights are at
    the end from one device's in the same precision and from float32's in plain torch."""
    layout = HALF_LAYOUTS[name]
    variant = half_variant(layout)
    plain = _half_reference(variant, layout.rule, precision)
    [one] = _half_outcomes(Layout(world=1, rule=layout.rule), variant)
    assert precision != "16-mixed" or one[precision].factors == SCALES, one[precision].factors
    # One rank holds each parameter as one part.
    alone = {parameter: tensor for parameter, [(_, tensor)] in one[precision].weights.items()}
    found = dict.fromkeys(HALF_QUANTITIES[precision], 0.0)
    covered = Covered(plain.weights)
    for outcomes in _half_outcomes(layout, variant):
        outcome = outcomes[precision]
        good = [moved for step, moved in enumerate(outcome.moved) if precision != "16-mixed" or step != BAD_STEP]
        assert len(outcome.moved) == NUM_STEPS and min(good) > 0, "a step that should have been done moved nothing"
        worst = {
            "left out": _apart(outcome.moved[BAD_STEP], 0.0),
            "scale": max(_apart(*factors) for factors in zip(outcome.factors, one[precision].factors, strict=True)),
            "one device": max(_difference(parts, alone[n]) for n, parts in outcome.weights.items()),
            "float32": max(_difference(parts, plain.weights[n]) for n, parts in outcome.weights.items()),
        }
        found = {quantity: max(largest, worst[quantity]) for quantity, largest in found.items()}
        for parameter, parts in outcome.weights.items():
            covered.add(parameter, parts)
    covered.require_all()
    return found
