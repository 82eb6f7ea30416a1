"""Blending: counts follow the weights at every prefix, and the order needs no table."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_megatron.data.blend import Blend, BlendedSamples

WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=12).filter(any)
FURTHEST = 1.7


def order_by_counting(weights: list[float], num_samples: int) -> list[tuple[int, int]]:
    """The rule in plain words and exact fractions: a tree of the two lightest, and a counter at every node."""
    nodes = [(Fraction(w / max(weights)), i, [i]) for i, w in enumerate(weights) if w]
    parents = {}
    number = itertools.count(len(weights))
    while len(nodes) > 1:
        nodes.sort(key=lambda node: node[:2])
        light, heavy, *nodes = nodes
        name = next(number)
        parents[name] = (light[1], heavy[1], light[0] / (light[0] + heavy[0]))
        nodes.append((light[0] + heavy[0], name, []))
    seen: dict[int, int] = {}
    order = []
    for _ in range(num_samples):
        node = nodes[0][1]
        while node in parents:
            light, heavy, fraction = parents[node]
            count = seen.setdefault(node, 0)
            is_light = (count + 1) * fraction + Fraction(1, 2) >= (int(count * fraction + Fraction(1, 2)) + 1)
            seen[node] = count + 1
            node = light if is_light else heavy
        order.append((node, seen.setdefault(node, 0)))
        seen[node] += 1
    return order


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any))
def test_the_order_is_that_of_counting_one_by_one(drawn: list[int]) -> None:
    # Roots of primes: no two sums are alike, and no share times a count lies at a half.
    roots = [math.sqrt(prime) for prime in (2, 3, 5, 7, 11, 13, 17)]
    weights = [w and w + root for w, root in zip(drawn, roots, strict=False)]
    assert [Blend(weights).locate(i) for i in range(300)] == order_by_counting(weights, 300)


@given(WEIGHTS)
@example([0.9, *[0.001] * 100])
@example([1e-300, 1.0, 1e300])
@example([2.0**-i for i in range(40)])
@example([1.618**i for i in range(25)])
def test_counts_follow_the_weights_at_every_prefix(weights: list[float]) -> None:
    blend = Blend(weights)
    num_samples = 2000
    sources = np.array([blend.locate(i)[0] for i in range(num_samples)])
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    shares = np.array(weights) / max(weights)
    shares /= shares.sum()
    assert np.abs(counts - np.arange(1, num_samples + 1)[:, None] * shares).max() < FURTHEST
    assert all(counts[-1, i] == 0 for i, w in enumerate(weights) if w == 0)
    assert blend.counts(num_samples) == counts[-1].tolist()


@given(WEIGHTS, st.integers(0, 10**12))
def test_far_out_counts_follow_the_weights_too(weights: list[float], num_samples: int) -> None:
    counts = Blend(weights).counts(num_samples)
    assert sum(counts) == num_samples
    total = sum(map(Fraction, weights))
    for count, weight in zip(counts, weights, strict=True):
        # A share in float64 is off by 2^-53 of itself for each node above it.
        assert abs(count - num_samples * Fraction(weight) / total) < FURTHEST + num_samples * 2.0**-49


@given(WEIGHTS)
def test_each_source_gives_its_samples_in_order(weights: list[float]) -> None:
    blend = Blend(weights)
    sources, numbers = np.array([blend.locate(i) for i in range(500)]).T
    for source in range(len(weights)):
        mine = numbers[sources == source]
        assert mine.tolist() == list(range(len(mine)))


@given(WEIGHTS, st.sampled_from([0.1, 3.0, 1024.0]))
def test_weights_are_in_proportion(weights: list[float], times: float) -> None:
    assert Blend(weights).shares == pytest.approx(Blend([w * times for w in weights]).shares)


@pytest.mark.parametrize(
    ("weights", "shown"),
    [
        ([], "all 0 are 0"),
        ([0.0, 0.0], "all 2 are 0"),
        ([1.0, -0.5, -2], "number 1 is -0.5; number 2 is -2"),
        ([1.0, float("nan")], "number 1 is nan"),
        ([float("inf"), 1.0], "number 0 is inf"),
    ],
)
def test_weights_that_are_none_are_refused(weights: list[float], shown: str) -> None:
    with pytest.raises(ValueError, match=shown):
        Blend(weights)


def test_samples_are_those_of_the_sources() -> None:
    sources = [[f"{name}{i}" for i in range(50)] for name in "abc"]
    samples = BlendedSamples(sources, [2, 1, 1], 40)
    found = [samples[i] for i in range(len(samples))]
    assert [sum(s.startswith(name) for s in found) for name in "abc"] == [20, 10, 10]
    assert [s for s in found if s[0] == "a"] == sources[0][:20]
    for index in (-1, 40):
        with pytest.raises(IndexError):
            samples[index]


@given(st.lists(st.tuples(st.floats(0.01, 5), st.integers(0, 30)), min_size=1, max_size=5))
def test_a_source_that_is_too_small_is_reported_with_what_would_do(given_: list[tuple[float, int]]) -> None:
    weights, sizes = [w for w, _ in given_], [size for _, size in given_]
    most = Blend(weights).most_samples(sizes)
    sources = [range(size) for size in sizes]
    if most:
        assert len(BlendedSamples(sources, weights, most)) == most
    with pytest.raises(ValueError, match=f"at most {most}"):
        BlendedSamples(sources, weights, most + 1)


def test_as_many_weights_as_sources_are_needed() -> None:
    with pytest.raises(ValueError, match="2 sources have 1 weights"):
        BlendedSamples([[1], [2]], [1.0], 1)
