"""Plans of random steps: the rules that they always obey, and how near they come to the lower bound."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.document_lengths import COMMON_CRAWL, GITHUB, LOG_NORMAL, LengthDistribution
from lightning_megatron.context.balance import CostModel, DynamicContextConfig, StepPlan, group_sizes, plan
from lightning_megatron.context.balance.bound import fewest_microbatches
from lightning_megatron.context.balance.slots import group_seconds
from tests.context.plans import COSTS, LLAMA_13B, ONLY_COMPUTE, require_sound, seconds_by_hand
from tests.harness.sample import WHOLE

# The share of the random steps that every run tries; `pytest --whole` tries all.
SHARE = 1.0 if WHOLE in os.environ else 0.3
RANKS = [1, 2, 3, 4, 6, 8, 12, 16, 20, 32, 64]


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    """A step of any size, with any config that goes with its ranks."""
    ranks = draw(st.sampled_from(RANKS))
    sizes = group_sizes(ranks, DynamicContextConfig(max_tokens_per_rank=1))
    widest = draw(st.integers(0, len(sizes) - 1))
    powers = [size for size in sizes[: widest + 1] if size & (size - 1) == 0]
    cap = draw(st.sampled_from([1, 5, 64, 1000]))
    config = DynamicContextConfig(
        max_tokens_per_rank=cap,
        min_group_size=draw(st.sampled_from(powers)),
        max_group_size=draw(st.sampled_from([0, sizes[widest]])),
        microbatch_multiple=draw(st.integers(1, 5)),
        min_microbatches=draw(st.integers(1, 9)),
    )
    longest = cap * group_sizes(ranks, config)[-1]
    length = st.one_of(
        st.integers(1, min(longest, 20)),
        st.integers(1, min(longest, 2 * cap)),
        st.integers(1, longest),
        st.just(longest),
    )
    lengths = draw(st.lists(length, min_size=1, max_size=60))
    pp = draw(st.sampled_from([1, 1, 2, 8]))
    return {"lengths": lengths, "ranks": ranks, "config": config, "pp": pp}


@settings(max_examples=int(1200 * SHARE), deadline=None, derandomize=True)
@given(step=steps(), cost=st.sampled_from(list(COSTS.values())))
def test_every_plan_keeps_documents_groups_memory_and_microbatches(step: dict[str, Any], cost: Any) -> None:
    lengths, ranks, config = step["lengths"], step["ranks"], step["config"]
    made = plan(lengths, ranks, cost, config, pp=step["pp"])
    require_sound(made, lengths, ranks, config, cost, step["pp"])
    assert len(made.slots) >= fewest_microbatches(lengths, ranks, config)
    assert made.seconds == pytest.approx(seconds_by_hand(made, lengths, cost, step["pp"]), rel=1e-9)
    assert made.lower_bound <= made.seconds * (1 + 1e-9)
    assert {len(made.groups_of(rank)) for rank in range(ranks)} == {len(made.slots)}
    assert all(rank in group.ranks for rank in range(ranks) for group in made.groups_of(rank))
    assert made == plan(np.array(lengths), ranks, cost, config, pp=step["pp"])  # type: ignore[arg-type]


def ratios(lengths_like: LengthDistribution, ranks: int, num_sets: int) -> list[float]:
    """Time over lower bound of plans of sets with 4 to 32 documents a rank, under several memory caps."""
    rng = np.random.default_rng(ranks)
    found = []
    for _ in range(num_sets):
        cap = int(rng.choice([4096, 8192, 16384]))
        config = DynamicContextConfig(max_tokens_per_rank=cap)
        longest = min(lengths_like.longest, cap * ranks)
        own = dataclasses.replace(lengths_like, longest=longest)
        lengths = own.draw(rng, ranks * int(rng.integers(4, 33)))
        made = plan(lengths, ranks, LLAMA_13B, config)
        require_sound(made, lengths, ranks, config, LLAMA_13B)
        found.append(made.seconds / made.lower_bound)
    return found


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("ranks", "num_sets"), [(8, 700), (16, 400), (64, 100)])
@pytest.mark.parametrize("lengths_like", [LOG_NORMAL, GITHUB], ids=["log-normal", "github"])
def test_the_slowest_rank_is_near_the_lower_bound(lengths_like: LengthDistribution, ranks: int, num_sets: int) -> None:
    found = ratios(lengths_like, ranks, int(num_sets * SHARE))
    assert min(found) >= 1 - 1e-9
    assert np.median(found) <= 1.10
    assert np.quantile(found, 0.9) <= 1.25


def waiting_seconds(made: StepPlan, lengths: list[int]) -> float:
    """What ranks stand idle for others of their group, with the cost of compute alone."""
    clocks, waited = [0.0] * made.num_ranks, 0.0
    for slot in made.slots:
        for group in slot:
            own = [lengths[d] for d in group.documents]
            started = max(clocks[rank] for rank in group.ranks)
            waited += sum(started - clocks[rank] for rank in group.ranks)
            end = started + ONLY_COMPUTE.seconds(sum(own), sum(n * n for n in own), group.size)
            for rank in group.ranks:
                clocks[rank] = end
    return waited


def test_no_rank_waits_for_another_between_microbatches() -> None:
    lengths = COMMON_CRAWL.draw(np.random.default_rng(0), 400)
    made = plan(lengths, 16, ONLY_COMPUTE, DynamicContextConfig(max_tokens_per_rank=16384))
    assert {group.size for slot in made.slots for group in slot} > {1}
    assert waiting_seconds(made, lengths) == pytest.approx(0.0, abs=1e-6)


def test_short_documents_run_on_one_rank_and_a_long_one_on_many() -> None:
    made = plan([100_000] + [500] * 400, 8, LLAMA_13B, DynamicContextConfig(max_tokens_per_rank=32768))
    sizes = {document: group.size for slot in made.slots for group in slot for document in group.documents}
    assert sizes[0] >= 4
    assert {sizes[document] for document in range(1, 401)} == {1}


def test_a_pipeline_gets_more_and_shorter_microbatches() -> None:
    lengths = LOG_NORMAL.draw(np.random.default_rng(3), 512)
    config = DynamicContextConfig(max_tokens_per_rank=32768, microbatch_multiple=4)
    flat = plan(lengths, 8, LLAMA_13B, config)
    piped = plan(lengths, 8, LLAMA_13B, config, pp=8)
    assert len(piped.slots) > len(flat.slots)
    assert piped.seconds < 0.8 * seconds_by_hand(flat, lengths, LLAMA_13B, 8)


def test_in_a_pipeline_the_first_and_last_microbatches_are_the_shortest() -> None:
    lengths = GITHUB.draw(np.random.default_rng(0), 512)
    config = DynamicContextConfig(max_tokens_per_rank=16384)
    made = plan(lengths, 16, LLAMA_13B, config, pp=4)
    longest = [max(group_seconds(group, lengths, LLAMA_13B) for group in slot) for slot in made.slots]
    top = longest.index(max(longest))
    assert 0 < top < len(longest) - 1
    assert longest[: top + 1] == sorted(longest[: top + 1])
    assert longest[top:] == sorted(longest[top:], reverse=True)


def test_a_rank_count_that_is_no_power_of_two_still_has_the_group_of_all() -> None:
    config = DynamicContextConfig(max_tokens_per_rank=10)
    assert group_sizes(6, config) == (1, 2, 6)
    made = plan([60, 3, 4], 6, ONLY_COMPUTE, config)
    require_sound(made, [60, 3, 4], 6, config, ONLY_COMPUTE)
    assert made.slots[0][0].size == 6


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "a step without documents"),
        ([5, 0, 7, -1], r"documents 1, 3 have no token; leave them out"),
        (
            [5, 81, 80, 1000],
            r"documents 1 \(81 tokens\), 3 \(1000 tokens\) are longer than max_tokens_per_rank \(10\) times the widest "
            r"group \(8 ranks\), 80 tokens; cut them, or set max_tokens_per_rank to at least 125$",
        ),
        ([81] * 9, r"4 \(81 tokens\) and 4 more are longer"),
    ],
)
def test_documents_that_cannot_be_planned_are_all_reported_with_the_way_out(lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(lengths, 8, ONLY_COMPUTE, DynamicContextConfig(max_tokens_per_rank=10))


def test_ranks_that_a_wide_group_leaves_idle_get_few_short_documents_each() -> None:
    rng = np.random.default_rng(0)
    lengths = [96_000, 44_000, 18_000, *dataclasses.replace(LOG_NORMAL, longest=16_000).draw(rng, 320)]
    made = plan(lengths, 64, LLAMA_13B, DynamicContextConfig(max_tokens_per_rank=4096))
    assert made.seconds <= 1.25 * made.lower_bound


def test_a_group_stays_empty_where_sending_takes_longer_than_computing() -> None:
    slow = CostModel(seconds_per_token=1e-3, latency_seconds=30.0)
    made = plan([100], 8, slow, DynamicContextConfig(max_tokens_per_rank=200))
    assert made.seconds == pytest.approx(0.1) == made.lower_bound
