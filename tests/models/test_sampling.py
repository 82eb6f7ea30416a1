"""A token is drawn with its probability, by a number that its seed, sample and position name."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatron.models.sampling import GenerationConfig, draw, probabilities

LOGITS = torch.tensor([1.0, 3.0, 2.0, 2.5, -1.0], dtype=torch.float64)


def drawn(num: int, **options: Any) -> Tensor:
    """How often each token was drawn at that many positions of as many samples."""
    config = GenerationConfig(**options)
    places = torch.arange(num)
    tokens = draw(LOGITS.expand(num, -1), config, samples_B=places % 7, positions_B=places // 7)
    return torch.bincount(tokens, minlength=len(LOGITS)).double() / num


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_tokens_come_as_often_as_they_are_likely(temperature: float) -> None:
    wanted = (LOGITS / temperature).softmax(dim=-1)
    # Four standard deviations of a share of 20000 draws.
    torch.testing.assert_close(drawn(20000, temperature=temperature), wanted, rtol=0, atol=0.015)


def test_of_top_k_only_the_likeliest_come() -> None:
    wanted = LOGITS.masked_fill(torch.tensor([True, False, True, False, True]), -torch.inf).softmax(dim=-1)
    found = drawn(20000, temperature=1.0, top_k=2)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.015)
    assert found[[0, 2, 4]].sum() == 0


@pytest.mark.parametrize(
    ("top_p", "nucleus"),
    # In order they have 0.470, 0.285, 0.173, 0.064 and 0.009.
    [(1e-9, [1]), (0.46, [1]), (0.48, [1, 3]), (0.77, [1, 2, 3]), (0.94, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3, 4])],
)
def test_of_top_p_the_fewest_come_that_reach_it(top_p: float, nucleus: list[int]) -> None:
    assert drawn(5000, temperature=1.0, top_p=top_p).nonzero().flatten().tolist() == nucleus


def test_top_p_counts_among_the_top_k() -> None:
    # Of two, the first has 0.622.
    assert drawn(5000, temperature=1.0, top_k=2, top_p=0.6).nonzero().flatten().tolist() == [1]
    assert drawn(5000, temperature=1.0, top_k=2, top_p=0.65).nonzero().flatten().tolist() == [1, 3]


def test_seed_sample_and_position_each_name_another_number() -> None:
    flat = torch.zeros(50, 100)

    def tokens(seed: int, samples: Tensor, positions: Tensor) -> list[int]:
        return draw(flat, GenerationConfig(seed=seed), samples_B=samples, positions_B=positions).tolist()

    ones, places = torch.ones(50, dtype=torch.int64), torch.arange(50)
    found = [tokens(0, ones, places), tokens(1, ones, places), tokens(0, 2 * ones, places), tokens(0, places, ones)]
    assert found[0] == tokens(0, ones, places)
    assert all(len(set(each)) > 20 for each in found) and len({tuple(each) for each in found}) == 4


def test_a_small_temperature_is_the_likeliest_token_and_logits_stay_as_they_are() -> None:
    before = LOGITS.clone()
    assert drawn(50, temperature=1e-300)[1] == drawn(50, temperature=0.0)[1] == 1
    drawn(50, top_k=2)
    assert torch.equal(LOGITS, before)


def test_all_settings_that_make_no_sense_are_reported_at_once() -> None:
    with pytest.raises(ValueError) as error:
        GenerationConfig(max_new_tokens=-1, temperature=float("nan"), top_k=-2, top_p=0.0, stop_tokens=(3, -1))
    assert all(word in str(error.value) for word in ("max_new_tokens (-1)", "nan", "top_k (-2)", "top_p (0.0)", "-1;"))
    # It would give a probability to an excluded token.
    with pytest.raises(ValueError, match=r"temperature \(inf\) must be a number of at least 0"):
        GenerationConfig(temperature=math.inf)


def plain(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The probabilities of one row, token by token, as the papers say it."""
    weights = {token: math.exp(logit / temperature) for token, logit in enumerate(logits)}
    ranked = sorted(weights, key=lambda token: (-weights[token], token))
    if top_k:
        ranked = ranked[:top_k]
    total, nucleus, reached = sum(weights[token] for token in ranked), [], 0.0
    for token in ranked:
        nucleus.append(token)
        reached += weights[token] / total
        if reached >= top_p:
            break
    total = sum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(logits))]


@settings(max_examples=300, deadline=None)
@given(
    # Of few values, so that many are equal.
    st.lists(st.integers(-8, 8).map(lambda n: n / 3), min_size=1, max_size=12),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.integers(0, 14),
    st.sampled_from([0.0317, 0.2713, 0.5119, 0.9007, 0.9973, 1.0]),
)
def test_probabilities_are_exactly_those_of_a_plain_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    config = GenerationConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    # In float64 and with another row.
    rows = torch.tensor([logits, logits[::-1]], dtype=torch.float64)
    found = probabilities(rows, config)
    for row, own in ((0, logits), (1, logits[::-1])):
        wanted = torch.tensor(plain(own, temperature, top_k, top_p), dtype=torch.float64)
        torch.testing.assert_close(found[row], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "fewest", "most"),
    [
        (0.7, 50, 0.8, 6, 49),
        (0.7, 50, 1.0, 50, 50),
        (0.7, 0, 0.8, 6, 199),
        (5.0, 0, 0.99, 100, 199),
        # More than there are.
        (1.0, 1000, 1.0, 200, 200),
        (1.0, 1000, 0.5, 2, 199),
        # The likeliest alone, however it is set.
        (1.0, 1, 1.0, 1, 1),
        (1.0, 0, 1e-12, 1, 1),
        (1.0, 3, 1e-12, 1, 1),
        (1e-5, 0, 1.0, 1, 1),
    ],
)
def test_probabilities_are_those_of_transformers(
    temperature: float, top_k: int, top_p: float, fewest: int, most: int
) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # A token that is never drawn.
    logits[2, 17] = -torch.inf
    warped = processors.TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        warped = processors.TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = processors.TopPLogitsWarper(top_p)(None, warped)
    found = probabilities(logits, GenerationConfig(temperature=temperature, top_k=top_k, top_p=top_p))
    torch.testing.assert_close(found, warped.softmax(dim=-1), rtol=0, atol=1e-12)
    num_likeliest = (found > 0).sum(dim=-1)
    assert fewest <= int(num_likeliest[0]) <= most and int(num_likeliest.min()) >= 1
    assert not found[2, 17]
