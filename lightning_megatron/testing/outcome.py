"""The rows of a certificate: one for each layout, with the deviation of each quantity and what differs first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_megatron.testing.layout_name import Layout
from lightning_megatron.testing.quantities import INITIAL, QUANTITIES, Deviation
from lightning_megatron.testing.run import Facts

TOLERANCE = {"64-true": 1e-9, "32-true": 1e-4}
"""Largest relative deviation that counts as equal, by precision: far above rounding, and far below a wrong term."""

Verdict = Literal["equal", "differs", "refused", "failed", "not run"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first thing that differs, and why it may."""

    deviation: Deviation
    cause: str
    mend: str


@dataclass(frozen=True, kw_only=True)
class LayoutResult:
    """A row of the certificate."""

    layout: Layout
    verdict: Verdict
    message: str = ""
    """Why it was refused, failed or was not run."""
    largest: dict[str, float] = field(default_factory=dict)
    """Largest relative deviation over all steps, names and ranks, by quantity."""
    first: dict[str, Deviation] = field(default_factory=dict)
    """Where each quantity first differs: the earliest step, then the lowest rank."""
    differences: tuple[Difference, ...] = ()
    """What differs first in the order of the step; behind initial weights that differ what comes next, since those of
    one device are used."""
    warnings: tuple[str, ...] = ()
    """What the package warned of."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of comparing a module on one device with itself under layouts."""

    facts: Facts
    steps: int
    rows: int
    results: tuple[LayoutResult, ...]

    @property
    def tolerance(self) -> float:
        """Largest relative deviation that counts as equal."""
        return TOLERANCE[self.facts.precision]

    @property
    def differing(self) -> tuple[LayoutResult, ...]:
        """Layouts on which something differs, or that fail."""
        return tuple(result for result in self.results if result.verdict in ("differs", "failed"))


def summarised(deviations: Sequence[Deviation], tolerance: float) -> tuple[dict[str, float], dict[str, Deviation]]:
    """The largest deviation of each quantity, and where each first differs."""
    largest = {
        name: max((one.relative for one in deviations if one.quantity == name), default=math.nan) for name in QUANTITIES
    }
    first: dict[str, Deviation] = {}
    for one in deviations:
        if one.relative > tolerance and (one.quantity not in first or _when(one) < _when(first[one.quantity])):
            first[one.quantity] = one
    return {name: value for name, value in largest.items() if not math.isnan(value)}, first


def _when(deviation: Deviation) -> tuple[int, int]:
    return deviation.step, deviation.rank


def in_order(deviation: Deviation) -> tuple[int, int, int]:
    """Where a deviation stands in the order of steps, and in that of a step."""
    return deviation.step, QUANTITIES.index(deviation.quantity), deviation.rank


def firsts_of(first: dict[str, Deviation]) -> list[Deviation]:
    """What differs first, and the first after the initial weights where it is those."""
    ordered = sorted(first.values(), key=in_order)
    return ordered[:2] if ordered and ordered[0].quantity == INITIAL else ordered[:1]
