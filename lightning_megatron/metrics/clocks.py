"""How far the clocks of ranks are apart, from moments at which all of them met.

A rank notes its clock before and after a meeting, which nobody leaves before all have come. So no rank's `after` is
earlier than any other's `before`: with the first rank's clock as the true one, each meeting bounds a rank's offset,

    before - first's after  <=  offset  <=  after - first's before

and of several meetings the narrowest bounds hold together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Meeting = tuple[float, float]
"""A rank's clock before and after a meeting, seconds."""


@dataclass(frozen=True, slots=True)
class Offset:
    """The lead of a rank's clock over the first rank's, and its uncertainty."""

    seconds: float
    error_seconds: float
    """Bound on the error, in both directions."""


def offset_of(own: Sequence[Meeting], first: Sequence[Meeting]) -> Offset:
    """A rank's clock offset, from what it and the first rank noted of the same meetings."""
    lowest = max(before - first_after for (before, _), (_, first_after) in zip(own, first, strict=True))
    highest = min(after - first_before for (_, after), (first_before, _) in zip(own, first, strict=True))
    return Offset((lowest + highest) / 2, abs(highest - lowest) / 2)
