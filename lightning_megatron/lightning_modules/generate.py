"""Text from a language model, token by token.

The whole sequence goes through the model for each new token: right on every layout, and meant for samples, not for
serving. Every rank must call it alike: under pipeline parallelism a model call is a collective.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.models.gpt import GPTModel


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How text is drawn."""

    max_new_tokens: int = 64
    # tokens after the prompt
    temperature: float = 0.8
    # divides the logits before they are drawn from; 0 takes the likeliest token
    seed: int = 0
    # of the draws

    def __post_init__(self) -> None:
        faults = [
            f"{name} ({value}) must be at least 0"
            for name, value in (("max_new_tokens", self.max_new_tokens), ("temperature", self.temperature))
            if not value >= 0
        ]
        if faults:
            raise ValueError("\n".join(faults))


@torch.no_grad()
def generate(model: GPTModel, tokens: Tensor, *, max_new_tokens: int, temperature: float, seed: int) -> Tensor:
    """The prompts with what the model adds: [batch, sequence + max_new_tokens]; the same on every rank.

    A model with a longest sequence sees the last that many tokens.
    """
    config = model.config
    window = config.max_sequence_length if config.position == "learned" else tokens.shape[1] + max_new_tokens
    generator = torch.Generator().manual_seed(seed)
    for _ in range(max_new_tokens):
        logits: Tensor = model(tokens[:, -window:])[:, -1]
        following = _draw(logits, temperature, generator)
        tokens = torch.cat([tokens, following.to(tokens).unsqueeze(1)], dim=1)
    return tokens


def _draw(logits_BV: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One token for each row: [B], on the CPU."""
    # All ranks hold the same logits bit by bit; drawing on the CPU keeps the draws the same on every device, too.
    logits_BV = logits_BV.detach().double().cpu()
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    return torch.multinomial((logits_BV / temperature).softmax(dim=-1), 1, generator=generator).squeeze(1)
