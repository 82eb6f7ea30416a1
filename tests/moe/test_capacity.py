"""Tests of capacity: which choices stay, how many, on every cut of the tokens, and what is refused."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatron.comm.collectives import shard_slice
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.moe.capacity import DropPolicy, ExpertCapacity
from lightning_megatron.moe.sequence_groups import RoutedTokens, SequenceGroups
from lightning_megatron.moe.topk import expert_choice
from tests.harness.threads import new_group, run_on_threads
from tests.moe.plain_capacity import E, drop_by_hand


def alone(segments: list[int], num: int) -> SequenceGroups:
    """The groups of one device; -1 is padding."""
    ids_T = torch.tensor(segments, dtype=torch.int64)
    return SequenceGroups(ids_T=torch.where(ids_T < 0, num, ids_T), num_groups=num + 1, axes=())


def drop(experts: Tensor, weights: Tensor, capacity: ExpertCapacity, *, num: int = E) -> list[list[int]]:
    """Experts of each token of one sequence, -1 where dropped."""
    positions = torch.arange(len(experts))
    answer = capacity.drop(
        experts, weights, positions, alone([0] * len(experts), 1), num_chosen=experts.shape[1], num=num
    )
    return answer.tolist()


def choices_of(num_tokens: int, num_chosen: int, seed: int) -> tuple[Tensor, Tensor]:
    """Different experts of each token, some none; weights of few values, so that there are equals."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.stack([torch.randperm(E, generator=generator)[:num_chosen] for _ in range(num_tokens)])
    experts[torch.rand(experts.shape, generator=generator) < 0.2] = -1
    return experts, torch.randint(1, 4, experts.shape, generator=generator) / 4


each_policy = pytest.mark.parametrize("drop_policy", ["probs", "position"])


@settings(max_examples=60)
@given(
    segments=st.lists(st.integers(-1, 2), min_size=1, max_size=16),
    num_chosen=st.integers(1, 3),
    factor=st.sampled_from(["0.1", "0.5", "0.8", "1.0", "1.1", "1.5", "4.0"]),
    seed=st.integers(0, 2**30),
)
@each_policy
def test_the_choices_that_stay_are_those_found_by_hand(
    segments: list[int], num_chosen: int, factor: str, drop_policy: DropPolicy, seed: int
) -> None:
    experts, weights = choices_of(len(segments), num_chosen, seed)
    # Tokens of a sequence lie in any order, as those of several ranks do.
    positions = torch.randperm(len(segments), generator=torch.Generator().manual_seed(seed))
    ours = ExpertCapacity(factor=float(factor), drop_policy=drop_policy).drop(
        experts, weights, positions, alone(segments, 3), num_chosen=num_chosen, num=E
    )
    assert ours.tolist() == drop_by_hand(
        experts, weights, segments, positions.tolist(), factor, num_chosen, drop_policy
    )


B, S, K = 4, 8, 2
# The rest is dp, which cuts rows; microbatches do so too.
CUTS = {
    "4 microbatches": (Sizes(), 4),
    "tp 2": (Sizes(world=2, tp=2), 1),
    "tp 2 sp": (Sizes(world=2, tp=2, sequence_parallel=True), 2),
    "cp 2": (Sizes(world=2, cp=2), 2),
    "dp 2": (Sizes(world=2), 2),
    "tp 2 cp 2 dp 2": (Sizes(world=8, tp=2, cp=2), 1),
}


@each_policy
@pytest.mark.parametrize(("sizes", "num_microbatches"), CUTS.values(), ids=CUTS)
def test_what_is_dropped_is_that_of_one_device_on_every_cut_of_the_batch(
    sizes: Sizes, num_microbatches: int, drop_policy: DropPolicy
) -> None:
    capacity = ExpertCapacity(factor=0.75, drop_policy=drop_policy)
    experts, weights = choices_of(B * S, K, 7)
    segments = [2 * b + (s >= 3) if (b, s) < (3, 5) else -1 for b in range(B) for s in range(S)]
    positions = [s - 3 * (s >= 3) for _ in range(B) for s in range(S)]
    right = torch.tensor(drop_by_hand(experts, weights, segments, positions, "0.75", K, drop_policy))
    # It bites: some are dropped, and rows by themselves, or parts of them, would drop others.
    assert int((right >= 0).sum()) < int((experts[torch.tensor(segments) >= 0] >= 0).sum())
    halves = [2 * number + s % 2 if number >= 0 else -1 for s, number in enumerate(segments)]
    assert drop_by_hand(experts, weights, halves, positions, "0.75", K, drop_policy) != right.tolist()

    def on_rank(world: Any) -> None:
        mesh = Mesh.build(sizes, world.rank(), new_group)
        rows = B // mesh.dp.size // num_microbatches
        chunk = S // (2 * mesh.cp.size)
        early, late = mesh.cp.rank * chunk, (2 * mesh.cp.size - 1 - mesh.cp.rank) * chunk
        columns = torch.cat([torch.arange(early, early + chunk), torch.arange(late, late + chunk)])
        for microbatch in range(num_microbatches):
            first = (mesh.dp.rank * num_microbatches + microbatch) * rows
            places_T = (torch.arange(first, first + rows).unsqueeze(1) * S + columns).flatten()
            places_T = shard_slice(places_T, mesh.tp)
            segments_T = torch.tensor(segments)[places_T]
            called = [number for number in segments[first * S : (first + rows) * S] if number >= 0]
            smallest = min(called, default=0)
            tokens = RoutedTokens(
                is_real_T=segments_T >= 0,
                num_real=int((segments_T >= 0).sum()),
                segments_T=segments_T - smallest,
                lengths=tuple(called.count(number) for number in sorted(set(called))),
                positions_T=torch.tensor(positions)[places_T],
                make_keys=partial(torch.clone, places_T),
                weights_T=torch.ones(len(places_T)),
                axes=(mesh.tp, mesh.cp),
            )
            ours = capacity.drop(
                experts[places_T], weights[places_T], tokens.positions_T, tokens.sequence_groups, num_chosen=K, num=E
            )
            assert torch.equal(ours, right[places_T])

    run_on_threads(sizes.world, on_rank)


def test_experts_that_choose_lose_nothing_to_a_factor_of_one_and_their_last_to_a_half() -> None:
    scores = torch.rand(8, E, generator=torch.Generator().manual_seed(1))
    groups, places = alone([0] * 5 + [1] * 3, 2), torch.arange(8)
    chosen = expert_choice(scores, places, groups, 2)
    full = ExpertCapacity(factor=1.0).drop(chosen, scores, places, groups, num_chosen=2, num=E)
    assert torch.equal(full, chosen) and bool((chosen >= 0).any())
    half = ExpertCapacity(factor=0.5).drop(chosen, scores, places, groups, num_chosen=2, num=E)
    # Of 5 tokens each takes 2 instead of 3, of 3 tokens 1 instead of 2.
    assert (half[:5] >= 0).sum(0).tolist() == [2] * E and (half[5:] >= 0).sum(0).tolist() == [1] * E
    for expert in range(E):
        best = scores[:5, expert].argsort(descending=True)[:2].sort().values
        assert (half[:5, expert] >= 0).nonzero().flatten().tolist() == best.tolist()


def test_the_greatest_weights_stay_or_the_first_tokens_do() -> None:
    experts, weights = torch.tensor([[0], [0], [0], [1]]), torch.tensor([[0.1], [0.9], [0.9], [0.2]])
    assert drop(experts, weights, ExpertCapacity(factor=1.0), num=2) == [[-1], [0], [0], [1]]
    assert drop(experts, weights, ExpertCapacity(factor=1.0, drop_policy="position"), num=2) == [[0], [0], [-1], [1]]
    # Among equals the first.
    assert drop(experts, weights, ExpertCapacity(factor=0.5), num=2) == [[-1], [0], [-1], [1]]


def test_the_capacity_is_the_even_share_times_the_factor_rounded_up_as_the_factor_is_written() -> None:
    assert ExpertCapacity(factor=1.0).num_rows(8, 2, 4) == 4
    assert ExpertCapacity(factor=1.25).num_rows(8, 2, 4) == 5
    assert ExpertCapacity(factor=1.26).num_rows(8, 2, 4) == 6
    assert ExpertCapacity(factor=1.1).num_rows(100, 1, 2) == 55
    assert math.ceil(1.1 * 100 / 2) == 56  # as a float


def test_a_call_without_tokens_has_nothing_to_drop() -> None:
    nothing = torch.empty(0, 2)
    assert drop(nothing.long(), nothing, ExpertCapacity(factor=1.0)) == []
    padding = ExpertCapacity(factor=1.0).drop(
        torch.tensor([[0, 1]]), torch.ones(1, 2), torch.zeros(1).long(), alone([-1], 0), num_chosen=2, num=E
    )
    assert padding.tolist() == [[-1, -1]]


def test_a_capacity_below_one_token_is_refused_with_what_would_do() -> None:
    (fault,) = ExpertCapacity(factor=1.5).length_faults(8, 2, 32)
    assert "is 0.75 tokens an expert and must be at least 1" in fault
    assert "use a factor of at least 2.0, sequences of 11 tokens, or no capacity" in fault
    assert not ExpertCapacity(factor=2.0).length_faults(8, 2, 32) and ExpertCapacity(factor=2.0).num_rows(8, 2, 32) == 1
    assert (
        not ExpertCapacity(factor=1.5).length_faults(11, 2, 32) and ExpertCapacity(factor=1.5).num_rows(11, 2, 32) == 2
    )
    assert ExpertCapacity(factor=1.5).length_faults(10, 2, 32)
    # The factor in the message is rounded up, never down.
    assert ExpertCapacity(factor=0.1).length_faults(6, 1, 4)[0].count("0.667") == 1
    assert not ExpertCapacity(factor=0.667).length_faults(6, 1, 4)


def test_a_sequence_that_is_shorter_leaves_each_expert_one_token_at_least() -> None:
    assert [ExpertCapacity(factor=1.0).num_rows(length, 2, 32) for length in (0, 1, 15, 16, 17)] == [0, 1, 1, 1, 2]


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(ValueError) as refused:
        ExpertCapacity(factor=0.0, drop_policy="luck")  # type: ignore[arg-type]
    assert str(refused.value).splitlines() == [
        "capacity factor (0.0) must be a number above 0; leave capacity out to drop nothing",
        "capacity drop_policy ('luck') must be one of 'probs', 'position'",
    ]
    for factor in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="must be a number above 0"):
            ExpertCapacity(factor=factor)
