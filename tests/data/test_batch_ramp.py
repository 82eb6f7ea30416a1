"""Ramp-up: sizes are a function of the samples seen, and batches follow each other."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.data.batch_ramp import BatchRamp
from tests.data.ramps import batches_of

RAMP = BatchRamp(first_size=16, last_size=64, step_size=16, ramp_samples=300)
RAMPS = st.builds(
    lambda first, step, steps, samples: BatchRamp(
        first_size=4 * first, step_size=4 * step, last_size=4 * (first + step * steps), ramp_samples=samples
    ),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(0, 500),
)


def test_sizes_grow_in_equal_parts_of_the_ramp() -> None:
    seen = [0, 99, 100, 199, 200, 299, 300, 10**9]
    assert [RAMP.size_at(samples) for samples in seen] == [16, 16, 32, 32, 48, 48, 64, 64]


@given(RAMPS, st.integers(0, 600))
def test_the_size_is_the_step_that_the_samples_seen_have_reached(ramp: BatchRamp, seen: int) -> None:
    size = ramp.first_size
    for step in range(1, ramp.num_steps + 1):
        if seen * ramp.num_steps >= step * ramp.ramp_samples:
            size = ramp.first_size + step * ramp.step_size
    assert ramp.size_at(seen) == (ramp.last_size if seen >= ramp.ramp_samples else size)
    assert ramp.size_at(seen) <= ramp.size_at(seen + 1) <= ramp.last_size


@given(RAMPS, st.integers(100, 1500))
def test_batches_follow_each_other_without_gaps(ramp: BatchRamp, num_samples: int) -> None:
    position = 0
    for first, size in batches_of(ramp, num_samples):
        assert (first, size) == (position, ramp.size_at(position))
        position += size
    assert position <= num_samples < position + ramp.size_at(position)


@given(RAMPS, st.integers(0, 1500))
def test_the_number_of_batches_is_that_of_those_that_follow_each_other(ramp: BatchRamp, num_samples: int) -> None:
    assert ramp.num_batches(num_samples) == len(list(batches_of(ramp, num_samples)))


@given(RAMPS)
def test_the_unit_divides_all_sizes_and_nothing_greater_does(ramp: BatchRamp) -> None:
    sizes = {size for _, size in batches_of(ramp, 2000)} | {ramp.size_at(samples) for samples in range(600)}
    assert all(size % ramp.unit == 0 for size in sizes)
    if ramp.ramp_samples > 500 * ramp.num_steps:
        assert math.gcd(*sizes) == ramp.unit


def test_a_constant_ramp_has_one_size() -> None:
    assert list(batches_of(BatchRamp.constant(6), 20)) == [(0, 6), (6, 6), (12, 6)]
    assert (BatchRamp.constant(6).unit, BatchRamp.constant(6).num_batches(20)) == (6, 3)
    assert BatchRamp(first_size=4, last_size=10, step_size=6, ramp_samples=99).unit == 2


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"last_size": 60}, r"do not lead to last_size \(60\); 48 or 64 would do"),
        ({"last_size": 8}, "not below first_size"),
        ({"first_size": 0}, "at least 1"),
        ({"step_size": 0}, "at least 1"),
        ({"ramp_samples": -1}, r"ramp_samples \(-1\)"),
        ({"last_size": 60, "ramp_samples": -1}, "would do; ramp_samples"),
    ],
)
def test_a_ramp_that_leads_nowhere_is_refused(changes: dict[str, int], shown: str) -> None:
    given_: dict[str, Any] = {"first_size": 16, "last_size": 64, "step_size": 16, "ramp_samples": 300} | changes
    with pytest.raises(ValueError, match=shown):
        BatchRamp(**given_)


def test_a_position_before_the_beginning_is_refused() -> None:
    with pytest.raises(ValueError, match=r"consumed_samples \(-1\)"):
        RAMP.size_at(-1)
