"""Sampling of the next token from logits, by random numbers that are a function of (seed, sample, position) alone.

    logits / temperature -> the top_k likeliest -> the fewest of them whose probability reaches top_p -> one of these

B rows, V vocabulary.
Source: Fan et al., arXiv 1805.04833, section 5.1 (top-k); Holtzman et al., arXiv 1904.09751, section 3.1 (top-p).
"""

import math

import torch
from torch import Tensor

from lightning_megatron.comm import rng
from lightning_megatron.config_dataclass import config_dataclass


@config_dataclass
class GenerationConfig:
    """Sampling of generated text, and where it ends. Raises ValueError that lists all faults at once."""

    max_new_tokens: int = 64
    """Largest number of tokens that are generated after the prompt."""
    temperature: float = 0.8
    """Temperature that logits are divided by before sampling; 0: the likeliest token is taken (greedy)."""
    top_k: int = 0
    """Number of likeliest tokens that are sampled from (top-k); 0: all."""
    top_p: float = 1.0
    """Probability mass of the likeliest tokens that are sampled from (top-p, nucleus sampling); 1: all."""
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end a row; the first of them that is generated is its last token."""
    stops_at_end_of_text: bool = True
    """Whether `predict` also stops at the end of text of the data's tokenizer, and where a Hugging Face folder that
    training began from ends a text (its `eos_token_id`)."""
    seed: int = 0
    """Seed of sampling."""

    def __post_init__(self) -> None:
        faults = [
            f"{name} ({value}) must be a number of at least 0"
            for name, value in (
                ("max_new_tokens", self.max_new_tokens),
                ("temperature", self.temperature),
                ("top_k", self.top_k),
            )
            if not (value >= 0 and math.isfinite(value))
        ]
        if not 0 < self.top_p <= 1:
            faults.append(f"top_p ({self.top_p}) must be above 0 and at most 1; 1 draws from all tokens")
        faults += [
            f"stop_tokens holds {token}; ids of tokens are at least 0" for token in self.stop_tokens if token < 0
        ]
        if faults:
            raise ValueError("\n".join(faults))


def draw(logits_BV: Tensor, config: GenerationConfig, *, samples_B: Tensor, positions_B: Tensor) -> Tensor:
    """Token ids sampled for each row, int64 [B]. Each stands at that position of the row's sample, counted from 0."""
    if config.temperature == 0:
        return logits_BV.argmax(dim=-1)
    probabilities_BV = probabilities(logits_BV, config)
    # In the order of the vocabulary: no rounding of the logits changes which token comes before which.
    sums_BV = probabilities_BV.cumsum(dim=-1)
    uniform_B = rng.uniform(rng.bits(rng.key(config.seed, "generation"), samples_B), positions_B)
    target_B1 = uniform_B.to(sums_BV.device).unsqueeze(1) * sums_BV[:, -1:]
    drawn_B = (sums_BV <= target_B1).sum(dim=-1)
    # A number next to 1, times the sum, may round to the sum.
    return torch.where(drawn_B < sums_BV.shape[1], drawn_B, probabilities_BV.argmax(dim=-1))


def probabilities(logits_BV: Tensor, config: GenerationConfig) -> Tensor:
    """Probabilities that each token is sampled with, at a temperature above 0: float64 [B, V]."""
    logits_BV = logits_BV.double()
    # The largest is taken out first: a small temperature would make it infinite.
    logits_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / config.temperature
    return _likeliest(logits_BV, config.top_k, config.top_p).softmax(dim=-1)


def _likeliest(logits_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    """The logits, -inf for all but the `top_k` highest, and of these for all but the first that have `top_p`."""
    if top_k == 0 and top_p == 1.0:
        return logits_BV
    # Of equal ones the first in the vocabulary.
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    if top_k:
        sorted_BV[:, top_k:] = -torch.inf
    probabilities_BV = sorted_BV.softmax(dim=-1)
    before_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV
    is_likely_BV = (before_BV < top_p) & (sorted_BV > -torch.inf)
    # Rounding must not leave a row without its likeliest token.
    is_likely_BV[:, 0] = True
    return torch.full_like(logits_BV, -torch.inf).scatter(1, order_BV, sorted_BV.masked_fill(~is_likely_BV, -torch.inf))
