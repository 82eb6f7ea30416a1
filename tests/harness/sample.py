"""A covering sample of a matrix of tests: every run sees every pair of settings, and few runs see every cell.

A cell of a matrix is a setting of some factors (tp 2, schedule zb_v, model llama ...). Most faults need one setting or
two that meet, so a sample in which each pair of settings that the matrix has meets at least once finds them. The
sample is chosen by a greedy rule without random numbers: it is the same on every machine and in every process.

`pytest --whole` runs the whole of each matrix, as `make certificate` does.

Source of the rule: Cohen et al., "The AETG System: An Approach to Testing Based on Combinatorial Design", IEEE
Transactions on Software Engineering 23(7), 1997, section 3; here the cells are given, so a cell is picked, not made.
"""

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import combinations
from operator import or_
from typing import TypeVar, cast

Case = TypeVar("Case")

# What `pytest --whole` sets (see tests/conftest.py): cases are chosen while test modules are imported.
WHOLE = "TESTS_WHOLE"


def pairs_of(factors: Mapping[str, Hashable]) -> list[Hashable]:
    """Each two settings of different factors that meet in a case."""
    return list(combinations(sorted(factors.items(), key=lambda setting: setting[0]), 2))


def covering(
    cases: Sequence[Case],
    pairs: Callable[[Case], Iterable[Hashable]],
    cost_of: Callable[[Case], float] = lambda case: 1.0,
) -> list[Case]:
    """The cases of a covering sample, in their order: each pair of settings that meets in `cases` meets in it.

    The next pick is the case with the most pairs that are new for what it costs; of equals it is the first.
    """
    numbers: dict[Hashable, int] = {}
    # By case: a number whose bits are the pairs of settings that meet in it.
    bits = [sum(1 << numbers.setdefault(pair, len(numbers)) for pair in set(pairs(case))) for case in cases]
    costs = [cost_of(case) for case in cases]
    missing = (1 << len(numbers)) - 1
    picked: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda index: ((bits[index] & missing).bit_count() / costs[index], -index))
        picked.append(best)
        missing &= ~bits[best]
    # A cheap early pick is often covered by what the later ones had to bring.
    for position in sorted(picked, key=lambda position: -costs[position]):
        others = [other for other in picked if other != position]
        if not bits[position] & ~reduce(or_, (bits[other] for other in others), 0):
            picked = others
    return [cases[position] for position in sorted(picked)]


def each_setting(cases: Sequence[Case], factors_of: Callable[[Case], Mapping[str, Hashable]]) -> list[Case]:
    """Cases, in their order, in which each setting of each factor comes, and none much oftener than others.

    For a matrix of two factors, of which all pairs are all cells: every row and every column is seen, on a diagonal.
    """
    settings = [frozenset(factors_of(case).items()) for case in cases]
    times: Counter[Hashable] = Counter()
    picked: set[int] = set()
    for _ in cases:
        gains = [sum(not times[one] for one in own) for own in settings]
        # Of equals the one whose settings came least often, then the first.
        ranks = [(gain, -sum(times[one] for one in own)) for gain, own in zip(gains, settings, strict=True)]
        best = ranks.index(max(ranks))
        if gains[best] == 0:
            break
        picked.add(best)
        times.update(settings[best])
    return [cases[position] for position in sorted(picked)]


def sampled(
    cases: Sequence[Case],
    pairs: Callable[[Case], Iterable[Hashable]],
    cost_of: Callable[[Case], float] = lambda case: 1.0,
) -> list[Case]:
    """The covering sample of the cases, or all of them under `pytest --whole`."""
    return list(cases) if WHOLE in os.environ else covering(cases, pairs, cost_of)


def diagonal(cases: Sequence[Case]) -> list[Case]:
    """Of cells (row, column, ...) those in which each row and each column comes; all under `pytest --whole`."""

    def factors_of(case: Case) -> dict[str, Hashable]:
        return {str(position): setting for position, setting in enumerate(cast(tuple[Hashable, ...], case))}

    return list(cases) if WHOLE in os.environ else each_setting(cases, factors_of)


def sample_of_matrix(cells: Sequence[Mapping[str, object]]) -> list[int]:
    """Cells, keyed by their parameters, that a test marked `matrix` runs: all pairs, or of two factors a diagonal."""

    def factors_of(position: int) -> dict[str, Hashable]:
        # A mutable value is identified by its object.
        return {name: one if isinstance(one, Hashable) else id(one) for name, one in cells[position].items()}

    if len(cells[0]) > 2:
        return covering(range(len(cells)), lambda position: pairs_of(factors_of(position)))
    return each_setting(range(len(cells)), factors_of)


def every_nth(cases: Iterable[Case], n: int) -> list[Case]:
    """Each n-th of the cases, from the first on; all of them under `pytest --whole`."""
    return list(cases)[:: 1 if WHOLE in os.environ else n]
