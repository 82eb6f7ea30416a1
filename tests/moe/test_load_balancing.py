"""Tests of the sums of the auxiliary losses, and of the bias."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lightning_megatron.moe import load_balancing

counts = st.lists(st.integers(0, 1000), min_size=1, max_size=9)


@given(counts=counts)
def test_the_mean_load_is_one(counts: list[int]) -> None:
    load_E = load_balancing.expert_load(torch.tensor([counts]), torch.float64)[0]
    assert abs(float(load_E.mean()) - 1) < 1e-12
    if sum(counts):
        for busy, count in zip(load_E.tolist(), counts, strict=True):
            assert abs(busy - count / (sum(counts) / len(counts))) < 1e-9


@given(counts=counts)
def test_the_bias_rises_for_the_less_busy_and_falls_for_the_busier(counts: list[int]) -> None:
    mean = sum(counts) / len(counts)
    step = load_balancing.expert_bias_step(torch.tensor(counts))
    assert step.tolist() == [(count < mean) - (count > mean) for count in counts]


def test_a_balance_loss_is_one_per_token_where_experts_are_equally_busy_and_more_where_scores_follow_load() -> None:
    probabilities_TE = torch.softmax(torch.randn(12, 4, dtype=torch.float64), 1)
    is_real_T, ones_T = torch.arange(12) < 9, torch.ones(12, dtype=torch.float64)
    level = load_balancing.expert_load(torch.tensor([[5, 5, 5, 5]]), torch.float64)
    assert_close(load_balancing.aux_loss_sum(probabilities_TE, level, ones_T, is_real_T), torch.tensor(9.0).double())
    # A token of weight 3 counts as three.
    weights_T = torch.where(torch.arange(12) == 4, 3.0, 1.0).double()
    weighted = load_balancing.aux_loss_sum(probabilities_TE, level, weights_T, is_real_T)
    assert_close(weighted, torch.tensor(11.0).double())
    one_sided = torch.zeros(12, 4, dtype=torch.float64)
    one_sided[:, 2] = 1.0
    steep = load_balancing.expert_load(torch.tensor([[0, 0, 20, 0]]), torch.float64)
    assert load_balancing.aux_loss_sum(one_sided, steep, ones_T, is_real_T) == 36


def test_padding_gives_a_loss_no_gradient_even_where_it_is_not_finite() -> None:
    logits_TE = torch.randn(4, 3, dtype=torch.float64)
    logits_TE[3] = torch.nan
    logits_TE.requires_grad_()
    is_real_T = torch.tensor([True, True, False, False])
    weights_T = torch.tensor([0.5, 2.0, 1.0, 1.0], dtype=torch.float64)
    load_balancing.aux_loss_sum(logits_TE, torch.ones(1, 3), weights_T, is_real_T).backward()
    assert logits_TE.grad is not None
    assert_close(logits_TE.grad, (is_real_T * weights_T).unsqueeze(1).expand(4, 3))
    z = load_balancing.z_loss_sum(logits_TE, weights_T, is_real_T)
    squares = logits_TE[:2].exp().sum(1).log().square()
    assert_close(z, 0.5 * squares[0] + 2.0 * squares[1])
