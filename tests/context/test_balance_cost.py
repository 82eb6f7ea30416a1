"""The cost model: its formula, its fit, and what a user can get wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.context.balance import (
    CostModel,
    DynamicContextConfig,
    Measurement,
    fit,
    group_sizes,
)
from lightning_megatron.context.balance.fit import nonnegative_least_squares
from tests.context.plans import LLAMA_13B, SLOW_RING


def measured(cost: CostModel, rng: np.random.Generator, noise: float) -> list[Measurement]:
    """What a short measurement would see: one to four equal documents on each size."""
    packs = [(n, length, size) for size in (1, 2, 4, 8) for n in (1, 4) for length in (256, 2048, 8192, 32768)]
    return [
        Measurement(
            n * length,
            n * length**2,
            size,
            cost.seconds(n * length, n * length**2, size) * float(rng.uniform(1 - noise, 1 + noise)),
        )
        for n, length, size in packs
    ]


@pytest.mark.parametrize("cost", [LLAMA_13B, SLOW_RING], ids=["llama", "slow ring"])
def test_a_fit_finds_the_constants_that_made_the_measurements(cost: CostModel) -> None:
    found = fit(measured(cost, np.random.default_rng(0), noise=0.0), ranks_per_node=cost.ranks_per_node)
    for tokens, squares, size in [(5000, 25_000_000, 1), (9000, 9_000_000, 4), (60_000, 10**9, 8)]:
        assert found.seconds(tokens, squares, size) == pytest.approx(cost.seconds(tokens, squares, size), rel=1e-3)
    assert found.seconds_per_token == pytest.approx(cost.seconds_per_token, rel=1e-3)
    assert found.seconds_per_square == pytest.approx(cost.seconds_per_square, rel=1e-3)


def test_a_fit_of_noisy_measurements_predicts_within_the_noise() -> None:
    found = fit(measured(SLOW_RING, np.random.default_rng(1), noise=0.05), ranks_per_node=4)
    for one in measured(SLOW_RING, np.random.default_rng(0), noise=0.0):
        assert found.seconds(one.tokens, one.squares, one.size) == pytest.approx(one.seconds, rel=0.1)


def test_a_fit_without_groups_knows_no_ring() -> None:
    alone = [one for one in measured(SLOW_RING, np.random.default_rng(0), noise=0.0) if one.size == 1]
    found = fit(alone)
    assert found.seconds_per_sent_token == found.latency_seconds == 0.0
    assert found.seconds_per_square == pytest.approx(SLOW_RING.seconds_per_square, rel=1e-6)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_no_other_nonnegative_constants_are_nearer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns, wanted = rng.normal(size=(8, 4)), rng.normal(size=8)
    found = nonnegative_least_squares(columns, wanted)
    gain = columns.T @ (wanted - columns @ found)
    # Optimal where no constant above 0 has a slope, and none at 0 would gain by growing.
    assert (found >= 0).all()
    assert np.abs(gain[found > 0]).max(initial=0.0) < 1e-8
    assert gain[found == 0].max(initial=-1.0) < 1e-8


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 10**5),
    squares=st.integers(1, 10**9),
    more=st.integers(1, 10**4),
    size=st.sampled_from([1, 2, 4, 8]),
    cost=st.sampled_from([LLAMA_13B, SLOW_RING]),
)
def test_more_tokens_or_squares_never_take_less(
    tokens: int, squares: int, more: int, size: int, cost: CostModel
) -> None:
    before = cost.seconds(tokens, squares, size)
    assert cost.seconds(tokens + more, squares, size) >= before
    assert cost.seconds(tokens, squares + more, size) >= before
    both = cost.seconds(np.array([float(tokens)]), np.array([float(squares)]), size)
    assert both[0] == pytest.approx(before, rel=1e-12)


def test_an_empty_microbatch_costs_its_fixed_part_on_any_size() -> None:
    assert {SLOW_RING.seconds(0, 0, size) for size in (1, 2, 8)} == {SLOW_RING.fixed_seconds}


def test_a_group_over_two_nodes_sends_at_the_far_rate() -> None:
    hidden = dataclasses.replace(SLOW_RING, seconds_per_square=0.0, latency_seconds=0.0)
    near, far = hidden.seconds(800, 800, 4), hidden.seconds(800, 800, 8)
    assert near == pytest.approx(100 + 200 + 3 * 0.5 * 200)
    assert far == pytest.approx(100 + 100 + 7 * 2.0 * 100)


def test_all_faults_of_the_constants_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"seconds_per_token \(nan\)(.|\n)*latency_seconds \(-1\)"):
        CostModel(seconds_per_token=float("nan"), latency_seconds=-1)
    with pytest.raises(ValueError, match="every token takes time"):
        CostModel(seconds_per_token=0.0)
    with pytest.raises(ValueError, match=r"measurement 1 \(0.0 seconds(.|\n)*at least 3"):
        fit([Measurement(1, 1, 1, 1.0), Measurement(1, 1, 1, 0.0)])


def test_all_faults_of_a_config_are_reported_at_once() -> None:
    message = r"max_tokens_per_rank \(0\)(.|\n)*min_group_size \(6\) must be a power of two; 4 or 8 is near"
    with pytest.raises(ValueError, match=message):
        DynamicContextConfig(max_tokens_per_rank=0, min_group_size=6)
    message = r"max_group_size \(2\) must not be below min_group_size \(4\)(.|\n)*balance_tolerance \(-1\)"
    with pytest.raises(ValueError, match=message):
        DynamicContextConfig(max_tokens_per_rank=1, min_group_size=4, max_group_size=2, balance_tolerance=-1)


def test_a_size_that_the_ranks_do_not_have_is_reported_with_those_they_have() -> None:
    with pytest.raises(ValueError, match=r"max_group_size \(4\) .* of 6 dp x cp ranks; it may be 1, 2, 6"):
        group_sizes(6, DynamicContextConfig(max_tokens_per_rank=1, max_group_size=4))
    assert group_sizes(16, DynamicContextConfig(max_tokens_per_rank=1, min_group_size=2, max_group_size=8)) == (2, 4, 8)
