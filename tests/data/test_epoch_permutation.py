"""Endless samples: each pass has every sample once in its own order, and dp ranks share batches of any size."""

import functools
import itertools
import operator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from lightning_megatron.data import BatchRamp, BlendedEpochs, InfiniteSampler, ShuffledEpochs
from lightning_megatron.data.epoch_permutation import shuffled
from tests.data.ramps import batches_of


class Named(Dataset[str]):
    """Sample i of "a" is a<i>."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, index: int) -> str:
        return f"{self.name}{index}"


@given(st.integers(1, 300), st.integers(-(2**63), 2**63 - 1))
def test_a_shuffle_is_a_permutation(count: int, seed: int) -> None:
    assert sorted(shuffled(i, count, seed) for i in range(count)) == list(range(count))


def test_a_shuffle_puts_every_number_everywhere() -> None:
    count, seeds = 6, 6000
    found = torch.zeros(count, count)
    for seed in range(seeds):
        for i in range(count):
            found[i, shuffled(i, count, seed * 0x1234567)] += 1
    # Binomial with a sixth of 6000: a standard deviation of 29.
    assert (found - seeds / count).abs().max() < 5 * 29


def test_neighbours_do_not_stay_neighbours() -> None:
    order = [shuffled(i, 1000, 5) for i in range(1000)]
    assert sum(abs(a - b) <= 2 for a, b in itertools.pairwise(order)) < 20


def test_each_pass_has_all_samples_once_in_another_order() -> None:
    passes = ShuffledEpochs(Named("a"), 50, seed=3)
    orders = [[passes[50 * turn + i] for i in range(50)] for turn in range(3)]
    assert all(sorted(order) == sorted(f"a{i}" for i in range(50)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert [ShuffledEpochs(Named("a"), 50, seed=4)[i] for i in range(50)] != orders[0]


def test_samples_that_bring_their_order_keep_it_in_every_pass() -> None:
    passes = ShuffledEpochs(Named("a"), 3, seed=3, is_ordered=True)
    assert [passes[i] for i in range(7)] == ["a0", "a1", "a2", "a0", "a1", "a2", "a0"]


@given(st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any), st.integers(0, 500))
def test_a_blend_takes_each_source_in_its_own_order(weights: list[int], count: int) -> None:
    sources = [ShuffledEpochs(Named(f"{name}:"), 7 + number, seed=number) for number, name in enumerate("abcde")]
    blended = BlendedEpochs(sources[: len(weights)], weights)
    found = [blended[i] for i in range(count)]
    for number, name in enumerate("abcde"[: len(weights)]):
        own = [sample for sample in found if sample.startswith(name)]
        assert own == [sources[number][i] for i in range(len(own))]
        assert abs(len(own) - count * weights[number] / sum(weights)) < 1.7


RAMPS = st.builds(
    lambda first, step, steps, samples: BatchRamp(
        first_size=4 * first, step_size=4 * step, last_size=4 * (first + step * steps), ramp_samples=samples
    ),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(0, 500),
)


@given(RAMPS, st.integers(1, 40), st.sampled_from([1, 2, 4]), st.integers(0, 30))
def test_dp_ranks_share_the_batches_of_one_and_a_run_goes_on_where_it_was(
    ramp: BatchRamp, num_batches: int, num_replicas: int, num_before: int
) -> None:
    whole = list(itertools.islice(batches_of(ramp, 10**6), num_before + num_batches))
    batches = [list(range(first, first + size)) for first, size in whole]
    replicas = [
        InfiniteSampler(ramp, num_batches, num_replicas=num_replicas, rank=rank) for rank in range(num_replicas)
    ]
    for dp_rank in replicas:
        dp_rank.consumed_samples = sum(map(len, batches[:num_before]))
        assert len(dp_rank) == num_batches
        assert dp_rank.next_size == len(batches[num_before])
    found = [functools.reduce(operator.iadd, parts, []) for parts in zip(*replicas, strict=True)]
    assert found == batches[num_before:]


@pytest.mark.parametrize(
    ("ramp", "shown"),
    [
        (BatchRamp(first_size=16, last_size=64, step_size=16, ramp_samples=9), "multiples of the data-parallel size"),
        (BatchRamp.constant(4), r"global_batch_size \(4\) must be a multiple of the data-parallel size \(3\).*3 or 6"),
    ],
)
def test_sizes_that_dp_ranks_cannot_share_are_refused(ramp: Any, shown: str) -> None:
    with pytest.raises(ValueError, match=shown):
        InfiniteSampler(ramp, 5, num_replicas=3, rank=0)


def test_samples_that_are_new_each_pass_are_asked_for_by_numbers_that_go_on() -> None:
    asked = ShuffledEpochs(range(40), 10, seed=1, is_new_each_epoch=True)  # type: ignore[arg-type]
    same = ShuffledEpochs(range(10), 10, seed=1)  # type: ignore[arg-type]
    assert [asked[n] for n in range(40)] == [n // 10 * 10 + same[n] for n in range(40)]
    assert sorted(asked[n] for n in range(40)) == list(range(40))
