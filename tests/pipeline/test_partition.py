"""Splits of parts over stages against all the splits there are."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.pipeline.partition import partition


def sizes(costs: Sequence[float], stages: int) -> list[int]:
    return [len(parts) for parts in partition(costs, stages)]


def brute_force(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """The best by the documented rule among every possible cut between costly parts."""
    costly = [part for part, cost in enumerate(costs) if cost > 0]

    def worth(split: tuple[range, ...]) -> tuple[Fraction, Fraction, list[int]]:
        stage_costs = [sum((Fraction(costs[part]) for part in parts), Fraction(0)) for parts in split]
        return max(stage_costs), sum((c * c for c in stage_costs), Fraction(0)), [len(parts) for parts in split]

    splits = []
    for cuts in combinations(costly[1:], stages - 1):
        bounds = [0, *cuts, len(costs)]
        splits.append(tuple(range(bounds[stage], bounds[stage + 1]) for stage in range(stages)))
    return min(splits, key=worth)


@settings(max_examples=300, deadline=None)
@given(
    costs=st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, 1.5, 7.0]) | st.floats(0, 10), min_size=1, max_size=9),
    stages=st.integers(1, 9),
)
def test_a_split_is_the_best_of_all_splits(costs: list[float], stages: int) -> None:
    num_costly = sum(cost > 0 for cost in costs)
    if num_costly < stages:
        with pytest.raises(ValueError, match=rf"stages \({stages}\) .* \({num_costly} of {len(costs)}\)"):
            partition(costs, stages)
    else:
        assert partition(costs, stages) == brute_force(costs, stages)


@settings(max_examples=100, deadline=None)
@given(costs=st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0]), min_size=20, max_size=130), stages=st.integers(1, 64))
def test_stages_are_contiguous_cover_all_parts_and_none_is_without_cost(costs: list[float], stages: int) -> None:
    stages = max(1, min(stages, sum(cost > 0 for cost in costs)))
    if not any(costs):
        return
    split = partition(costs, stages)
    assert [part for parts in split for part in parts] == list(range(len(costs)))
    assert len(split) == stages
    assert all(sum(costs[part] for part in parts) > 0 for parts in split)


def test_equal_layers_that_divide_are_split_equally_with_the_free_ends_on_the_end_stages() -> None:
    assert sizes([0, *[1] * 128, 0, 0], 64) == [3, *[2] * 62, 4]


def test_equal_layers_that_do_not_divide_leave_the_longer_stages_last() -> None:
    assert sizes([1.0] * 10, 4) == [2, 2, 3, 3]


def test_equal_costs_that_are_no_binary_fractions_are_true_ties() -> None:
    # Rounded sums of 0.1 differ in the last digit, which would decide where the longer stages are.
    assert sizes([0.1] * 10, 4) == [2, 2, 3, 3]
    assert sizes([0.1] * 130, 64) == [2] * 62 + [3] * 2


def test_a_part_of_no_cost_between_layers_stays_with_the_layer_before_it() -> None:
    assert partition([1, 0, 1, 0, 0, 1], 3) == (range(2), range(2, 5), range(5, 6))


def test_a_costly_head_makes_the_last_stage_shorter() -> None:
    assert sizes([*[1] * 8, 2], 5) == [2, 2, 2, 2, 1]


def test_costs_of_very_different_size_are_compared_exactly() -> None:
    # In float arithmetic 1e300 + 1 is 1e300.
    assert sizes([1e300, 1.0, 1.0, 1e300], 3) == [1, 2, 1]
    assert sizes([1e300, 1.0, 2.0, 1e300], 2) == [2, 2]


def test_too_few_costly_parts_are_refused_with_the_numbers_that_would_do() -> None:
    with pytest.raises(ValueError, match=r"stages \(3\) .* cost above 0 \(2 of 4\); stages may be 1 to 2$"):
        partition([0, 1, 1, 0], 3)
    with pytest.raises(ValueError, match=r"stages \(1\) .*\(0 of 2\); give at least one part a cost above 0$"):
        partition([0, 0], 1)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_is_none_is_refused(cost: float) -> None:
    with pytest.raises(ValueError, match=r"the cost of part 1 \(.*\) must be a finite number of at least 0"):
        partition([1.0, cost], 1)


def test_no_stages_are_refused() -> None:
    with pytest.raises(ValueError, match=r"stages \(0\) must be at least 1"):
        partition([1.0], 0)
