"""Tests of the choices: ties, groups, plans and capacities, on scores that tie and groups of any size."""

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from lightning_megatron.moe import topk
from lightning_megatron.moe.sequence_groups import SequenceGroups, routing_map
from tests.moe.plain_router import plain_top


def scores_of(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def one_device(ids: list[int], num_groups: int) -> SequenceGroups:
    """Pools that nobody shares; the last is that of padding."""
    return SequenceGroups(ids_T=torch.tensor(ids, dtype=torch.int64), num_groups=num_groups, axes=())


# Few values, so that most rows have ties.
tied_rows = st.integers(1, 6).flatmap(
    lambda size: st.lists(st.lists(st.integers(0, 2), min_size=size, max_size=size), min_size=1, max_size=4)
)


@given(rows=tied_rows, data=st.data())
def test_of_equal_scores_the_lowest_expert_is_chosen_first(rows: list[list[int]], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(rows[0])))
    assert topk.topk(scores_of(rows), count).tolist() == [plain_top(row, count) for row in rows]  # type: ignore[arg-type]


def test_ties_among_many_experts_go_to_the_lowest_too() -> None:
    # Sorts of many elements take other ways than those of few.
    assert torch.equal(topk.topk(torch.zeros(3, 1024), 8), torch.arange(8).expand(3, -1))


@given(seed=st.integers(0, 1000), num_groups=st.sampled_from([1, 2, 4]), num_chosen=st.integers(1, 4))
def test_experts_outside_of_the_best_groups_are_never_chosen(seed: int, num_groups: int, num_chosen: int) -> None:
    num_chosen = min(num_chosen, num_groups)
    scores_TE = torch.randint(0, 5, (6, 8), generator=torch.Generator().manual_seed(seed)).double()
    limited = topk.group_limited_scores(scores_TE, num_groups=num_groups, group_topk=num_chosen, count=num_chosen)
    size = 8 // num_groups
    for row, limited_row in zip(scores_TE.tolist(), limited.tolist(), strict=True):
        best = plain_top([max(row[g * size : (g + 1) * size]) for g in range(num_groups)], num_chosen)
        assert limited_row == [value if e // size in best else -torch.inf for e, value in enumerate(row)]


def test_a_group_is_worth_its_best_experts_and_not_its_best_one() -> None:
    scores_TE = scores_of([[9, 0, 0, 6, 5, 0, 4, 4]])
    limited = topk.group_limited_scores(scores_TE, num_groups=4, group_topk=2, count=4)
    # Sums of the best two: 9, 6, 5, 8.
    assert topk.topk(limited, 4).tolist() == [[0, 6, 7, 1]]


pool_ids = st.lists(st.integers(0, 3), min_size=1, max_size=24)


@settings(max_examples=40)
@given(ids=pool_ids, seed=st.integers(0, 1000))
def test_the_experts_of_a_plan_get_equally_much_of_every_pool(ids: list[int], seed: int) -> None:
    logits_TE = torch.randn(len(ids), 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    plan_TE = topk.sinkhorn(logits_TE, one_device(ids, 4), 200)
    sizes = Counter(ids)
    for pool in range(3):
        own = plan_TE[torch.tensor(ids) == pool]
        assert_close(own.sum(0), torch.full((4,), sizes[pool] / 4, dtype=torch.float64), rtol=0, atol=1e-6)
        assert_close(own.sum(1), torch.ones(sizes[pool], dtype=torch.float64), rtol=0, atol=1e-6)
    assert not plan_TE[torch.tensor(ids) == 3].any()


def test_a_plan_of_logits_far_apart_is_finite() -> None:
    logits_TE = torch.tensor([[2000.0, 0.0, -2000.0]]).expand(5, -1)
    plan_TE = topk.sinkhorn(logits_TE, one_device([0] * 5, 2), 20)
    assert bool(plan_TE.isfinite().all())


@settings(max_examples=60)
@given(ids=pool_ids, seed=st.integers(0, 1000), mean_count=st.integers(1, 4))
def test_each_expert_takes_its_best_tokens_of_every_pool(ids: list[int], seed: int, mean_count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores_TE = torch.randint(0, 3, (len(ids), 4), generator=generator).double()
    # Tokens lie in any order, as those of several ranks do.
    positions_T = torch.randperm(len(ids), generator=generator)
    expert_ids_TK = topk.expert_choice(scores_TE, positions_T, one_device(ids, 4), mean_count)
    right = torch.full_like(expert_ids_TK, -1)
    for pool in range(3):
        tokens = [t for t, number in enumerate(ids) if number == pool]
        capacity = -(-len(tokens) * mean_count // 4)
        for e in range(4):
            best = sorted(tokens, key=lambda t: (-scores_TE[t, e].item(), int(positions_T[t])))
            right[best[:capacity], e] = e
    assert torch.equal(expert_ids_TK, right)


def test_chance_gives_different_experts_that_are_a_function_of_the_key() -> None:
    keys_T = torch.arange(4000) * 7919
    expert_ids_TK = topk.random(keys_T, 8, 3)
    assert int(routing_map(expert_ids_TK, 8).max()) == 1
    assert torch.equal(topk.random(keys_T.flip(0), 8, 3).flip(0), expert_ids_TK)
    # 1500 each, with a deviation of 31.
    assert bool(((routing_map(expert_ids_TK, 8).sum(0) - 1500).abs() < 155).all())


@given(length=st.integers(1, 40), num_experts=st.integers(1, 9), data=st.data())
def test_experts_in_turn_are_equally_busy_to_one_token(length: int, num_experts: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, num_experts))
    mask_TE = routing_map(topk.round_robin(torch.arange(length), num_experts, count), num_experts)
    assert int(mask_TE.max()) == 1
    counts_E = mask_TE.sum(0)
    assert int(counts_E.max() - counts_E.min()) <= 1
