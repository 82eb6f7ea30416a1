"""Partition of a model's parts over pipeline stages, so that the slowest stage is as fast as it can be.

Before a step: the model is an ordered list of parts, each with a cost, and a stage is a run of neighbouring parts.
The time of a pipeline is that of its slowest stage, so the largest stage cost is made as small as possible first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def partition(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """The parts of each stage: contiguous ranges that cover all parts and minimise the largest stage cost.

    Every stage has at least one part that costs something. Parts of no cost do not weigh: those at the front go to the
    first stage, those at the end to the last, any other to the stage of the costly part before it.
    Of all such splits the one with the smallest sum of squared stage costs is taken (the most even one), and of those
    the one whose first stage is shortest, then the second, and so on: what does not divide evenly falls to late stages,
    because an early stage saves the activations of more microbatches. Sums are exact, so equal costs are true ties.
    Raises ValueError for a negative or infinite cost, and when there are fewer costly parts than stages.
    """
    weights = _exact(costs)
    costly = [part for part, weight in enumerate(weights) if weight]
    if stages < 1:
        raise ValueError(f"stages ({stages}) must be at least 1")
    if len(costly) < stages:
        fits = f"stages may be 1 to {len(costly)}" if costly else "give at least one part a cost above 0"
        raise ValueError(
            f"stages ({stages}) must not exceed the number of parts with a cost above 0 "
            f"({len(costly)} of {len(costs)}); {fits}"
        )
    sums = [0]
    for part in costly:
        sums.append(sums[-1] + weights[part])
    firsts = _most_even_cuts(sums, stages, _smallest_bound(sums, stages))
    starts = [0, *(costly[first] for first in firsts[1:]), len(costs)]
    return tuple(range(start, end) for start, end in pairwise(starts))


def _exact(costs: Sequence[float]) -> list[int]:
    """The costs as integers, all multiplied by one power of two, so that no sum is rounded."""
    for part, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"the cost of part {part} ({cost}) must be a finite number of at least 0")
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    scale = max((denominator for _, denominator in ratios), default=1)
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _smallest_bound(sums: list[int], stages: int) -> int:
    """The smallest possible cost of the largest stage, by bisection over the bound."""
    low, high = 0, sums[-1]
    while low < high:
        bound = (low + high) // 2
        low, high = (low, bound) if _fits(sums, stages, bound) else (bound + 1, high)
    return low


def _fits(sums: list[int], stages: int, bound: int) -> bool:
    """Whether filling one stage after another up to the bound takes no more than the stages there are."""
    num_filled, start = 0, 0
    for part in range(1, len(sums)):
        if sums[part] - sums[start] > bound:
            start = part - 1
            num_filled += 1
            if sums[part] - sums[start] > bound or num_filled == stages:
                return False
    return True


def _most_even_cuts(sums: list[int], stages: int, bound: int) -> list[int]:
    """The first costly part of each stage, by dynamic programming from the last stage to the first."""
    # squares[p]: the smallest sum of squares of parts p and after on the stages done so far; nexts: where to cut then.
    num_parts = len(sums) - 1
    squares: dict[int, int] = {num_parts: 0}
    nexts: list[dict[int, int]] = []
    for stages_after in range(stages):
        best: dict[int, int] = {}
        cut: dict[int, int] = {}
        for first in range(stages - stages_after - 1, num_parts - stages_after):
            for end in range(first + 1, num_parts + 1):
                cost = sums[end] - sums[first]
                if cost > bound:
                    break
                if end in squares and (first not in best or squares[end] + cost * cost < best[first]):
                    best[first] = squares[end] + cost * cost
                    cut[first] = end
        squares = best
        nexts.append(cut)
    firsts = [0]
    for cut in reversed(nexts[1:]):
        firsts.append(cut[firsts[-1]])
    return firsts
