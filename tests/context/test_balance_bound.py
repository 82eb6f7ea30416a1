"""The lower bound against every plan there is, on steps small enough to try them all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.context.balance import (
    CostModel,
    DynamicContextConfig,
    RankGroup,
    group_sizes,
    lower_bound,
    plan,
    step_seconds,
)
from lightning_megatron.context.balance.slots import SlotGroups
from tests.context.plans import COSTS, LLAMA_13B, ONLY_COMPUTE, ONLY_LINEAR


def all_slots(documents: dict[int, tuple[int, int]], ranks: int, smallest: int) -> SlotGroups | None:
    """The slot in which these documents run on these groups (size, block); None where groups overlap."""
    groups: dict[tuple[int, int], list[int]] = {}
    for document, place in documents.items():
        groups.setdefault(place, []).append(document)
    made = [RankGroup(size * block, size, tuple(own)) for (size, block), own in groups.items()]
    taken = [rank for group in made for rank in group.ranks]
    if len(set(taken)) < len(taken):
        return None
    free = set(range(ranks)) - set(taken)
    idle = [RankGroup(first, smallest, ()) for first in range(0, ranks, smallest) if first in free]
    return tuple(sorted([*made, *idle], key=lambda group: group.first))


def all_plans(
    lengths: list[int], ranks: int, config: DynamicContextConfig, count: int
) -> Iterator[tuple[SlotGroups, ...]]:
    """Every plan with so many microbatches."""
    sizes = group_sizes(ranks, config)
    places = [(m, size, block) for m in range(count) for size in sizes for block in range(ranks // size)]
    for choice in product(places, repeat=len(lengths)):
        slots = []
        for m in range(count):
            own = {d: place[1:] for d, place in enumerate(choice) if place[0] == m}
            slot = all_slots(own, ranks, sizes[0])
            cap = config.max_tokens_per_rank
            if slot is None or any(sum(lengths[d] for d in g.documents) > g.size * cap for g in slot):
                break
            slots.append(slot)
        else:
            yield tuple(slots)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    ranks=st.sampled_from([1, 2, 4]),
    cost=st.sampled_from(list(COSTS.values())),
    cap=st.sampled_from([10, 20, 40]),
    min_microbatches=st.sampled_from([1, 1, 2]),
    pp=st.sampled_from([1, 3]),
)
def test_no_plan_at_all_is_below_the_bound_and_ours_is_among_the_good_ones(
    lengths: list[int], ranks: int, cost: CostModel, cap: int, min_microbatches: int, pp: int
) -> None:
    lengths = [min(length, cap * ranks) for length in lengths]
    config = DynamicContextConfig(max_tokens_per_rank=cap, min_microbatches=min_microbatches)
    best = min(
        step_seconds(slots, lengths, cost, pp)
        for count in range(min_microbatches, max(min_microbatches, len(lengths)) + 1)
        for slots in all_plans(lengths, ranks, config, count)
    )
    assert lower_bound(lengths, ranks, cost, config, pp=pp) <= best * (1 + 1e-9)
    # The search is a heuristic: a few documents are its worst case.
    assert plan(lengths, ranks, cost, config, pp=pp).seconds <= 1.6 * best


@pytest.mark.parametrize(
    ("lengths", "ranks", "cost", "bound"),
    [
        # The mean: 40 tokens on 4 ranks.
        ([10, 10, 10, 10], 4, ONLY_LINEAR, 10.0),
        # Cutting is free, so one document is no bound by itself.
        ([40, 1, 1, 1, 1], 4, ONLY_LINEAR, 11.0),
        # 100 tokens and 10,000 squares at 1e-3 on 4 ranks.
        ([100], 4, ONLY_COMPUTE, (100 + 10) / 4),
    ],
)
def test_the_bound_is_what_is_counted_by_hand(lengths: list[int], ranks: int, cost: CostModel, bound: float) -> None:
    assert lower_bound(lengths, ranks, cost, DynamicContextConfig(max_tokens_per_rank=100)) == pytest.approx(bound)


def test_the_bound_counts_the_ring_of_documents_that_the_cap_forces_to_be_cut() -> None:
    cost = CostModel(seconds_per_token=1.0, seconds_per_sent_token=3.0)
    roomy, tight = DynamicContextConfig(max_tokens_per_rank=40), DynamicContextConfig(max_tokens_per_rank=20)
    # 8 documents of 40 tokens on 8 ranks: alone 40 seconds; on pairs two each, 20 of compute and 3 * 20 of messages.
    assert lower_bound([40] * 8, 8, cost, roomy) == pytest.approx(40.0)
    assert lower_bound([40] * 8, 8, cost, tight) == pytest.approx(2 * (20 + 60))


def test_fixed_parts_count_once_for_every_microbatch_that_is_needed() -> None:
    cost = CostModel(seconds_per_token=1.0, fixed_seconds=5.0)
    config = DynamicContextConfig(max_tokens_per_rank=10, microbatch_multiple=4)
    # 60 tokens on 2 ranks under a cap of 10 need 3 microbatches, rounded up to 4.
    assert lower_bound([10] * 6, 2, cost, config) == pytest.approx(30 + 4 * 5)


def test_a_longer_fill_of_the_pipeline_raises_the_bound() -> None:
    config = DynamicContextConfig(max_tokens_per_rank=8192)
    bounds = [lower_bound([4000] * 64, 8, LLAMA_13B, config, pp=pp) for pp in (1, 2, 8)]
    assert bounds == sorted(bounds) and len(set(bounds)) == 3
