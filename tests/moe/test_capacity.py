"""Tests of capacity: which choices stay, how many, and what is refused."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatron.moe.capacity import Capacity, Keeps

E = 4


def kept_by_hand(experts_TK: Tensor, weights_TK: Tensor, num_rows: int, keeps: Keeps) -> list[list[int]]:
    """Every expert looks through its choices one by one."""
    kept = [[-1] * experts_TK.shape[1] for _ in experts_TK]
    for expert in range(E):
        mine = [(t, k) for t, row in enumerate(experts_TK.tolist()) for k, each in enumerate(row) if each == expert]
        if keeps == "probability":
            mine.sort(key=lambda place: -float(weights_TK[place]))
        for t, k in mine[:num_rows]:
            kept[t][k] = expert
    return kept


@given(st.integers(1, 12), st.integers(1, 3), st.sampled_from(["probability", "position"]), st.integers(0, 2**30))
def test_the_choices_that_stay_are_those_found_by_hand(
    num_tokens: int, num_chosen: int, keeps: Keeps, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = torch.stack([torch.randperm(E, generator=generator)[:num_chosen] for _ in range(num_tokens)])
    experts[torch.rand(experts.shape, generator=generator) < 0.2] = -1
    # Few values, so that there are equals.
    weights = torch.randint(1, 4, experts.shape, generator=generator) / 4
    factor = max(0.8, math.ceil(100 * E / (num_tokens * num_chosen)) / 100)
    capacity = Capacity(factor=factor, keeps=keeps)
    num_rows = capacity.num_rows(num_tokens, num_chosen, E)
    kept = capacity.kept(experts, weights, E)
    assert kept.tolist() == kept_by_hand(experts, weights, num_rows, keeps)
    assert all((kept == expert).sum() <= num_rows for expert in range(E))


def test_the_greatest_weights_stay_or_the_first_tokens_do() -> None:
    experts, weights = torch.tensor([[0], [0], [0], [1]]), torch.tensor([[0.1], [0.9], [0.9], [0.2]])
    by_probability = Capacity(factor=1.0).kept(experts, weights, 2)
    assert by_probability.flatten().tolist() == [-1, 0, 0, 1]
    by_position = Capacity(factor=1.0, keeps="position").kept(experts, weights, 2)
    assert by_position.flatten().tolist() == [0, 0, -1, 1]
    among_equals = Capacity(factor=0.5).kept(experts, weights, 2)
    assert among_equals.flatten().tolist() == [-1, 0, -1, 1]


def test_the_capacity_is_the_even_share_times_the_factor_rounded_up_as_the_factor_is_written() -> None:
    assert Capacity(factor=1.0).num_rows(8, 2, 4) == 4
    assert Capacity(factor=1.25).num_rows(8, 2, 4) == 5
    assert Capacity(factor=1.26).num_rows(8, 2, 4) == 6
    assert Capacity(factor=1.1).num_rows(100, 1, 2) == 55
    assert math.ceil(1.1 * 100 / 2) == 56  # as a float


def test_a_rank_without_tokens_has_nothing_to_drop() -> None:
    nothing = torch.empty(0, 2)
    assert Capacity(factor=1.0).kept(nothing.long(), nothing, E).shape == (0, 2)


def test_a_capacity_below_one_token_is_refused_with_what_would_do() -> None:
    with pytest.raises(ValueError, match=r"is 0\.75 tokens an expert and must be at least 1") as refused:
        Capacity(factor=1.5).num_rows(8, 2, 32)
    assert "use a factor of at least 2.0, 11 tokens, or no capacity" in str(refused.value)
    assert Capacity(factor=2.0).num_rows(8, 2, 32) == 1
    assert Capacity(factor=1.5).num_rows(11, 2, 32) == 2
    assert Capacity(factor=1.5).token_faults(10, 2, 32)
    # The factor that is told is rounded up, never down.
    assert Capacity(factor=0.1).token_faults(6, 1, 4)[0].count("0.667") == 1
    assert not Capacity(factor=0.667).token_faults(6, 1, 4)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ValueError) as refused:
        Capacity(factor=0.0, keeps="luck")  # type: ignore[arg-type]
    assert str(refused.value).splitlines() == [
        "capacity factor (0.0) must be a number above 0; leave capacity out to drop nothing",
        "capacity keeps ('luck') must be one of 'probability', 'position'",
    ]
    for factor in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="must be a number above 0"):
            Capacity(factor=factor)
