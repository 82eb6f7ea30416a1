"""A GPT with low-rank paths on one device in plain torch, spelled out after the paper's equation 3."""

import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.comm import rng
from lightning_megatron.models import GPTConfig
from lightning_megatron.transformer.lora import LoraConfig
from tests.reference.gpt import ReferenceGPT, Weights


class ReferenceLora(ReferenceGPT):
    """Where `weights` hold `<linear>.lora.a` and `.b`, the linear adds alpha / rank times B A drop(x)."""

    def __init__(self, config: GPTConfig, lora: LoraConfig, weights: Weights, draws: rng.Draws | None = None) -> None:
        super().__init__(config, weights, draws)
        self.lora = lora

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = super().linear(x, name)
        if f"{name}.lora.a" not in self.weights:
            return y
        a, b = self.weights[f"{name}.lora.a"], self.weights[f"{name}.lora.b"]
        if self.draws is not None and self.lora.dropout > 0:
            keys = rng.bits(rng.key(name, "low-rank dropout"), self.token_keys(x.shape[0], x.shape[1]))
            keep = rng.keep_mask(keys, x.shape[2], self.lora.dropout)
            x = x * keep / (1 - self.lora.dropout)
        return y + F.linear(F.linear(x, a), b.flatten(0, -2)) * self.lora.alpha / self.lora.rank
