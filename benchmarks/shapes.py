"""The shapes that `gpu` trains, and how many of their layers fit into a device's memory.

Llama style: rotary positions, RMSNorm, SwiGLU, no biases, head not tied; Mixtral style where there are experts, all
layers alike. Bytes that a run needs, by formula:

    18 P              a parameter in float32, its gradient and both Adam moments, and its bf16 copy for the products
    2 L a             saved activations, a for each layer; twice, since the peers save more than this package
    14 T V            logits in bf16, and in float32 with their exponentials and gradients

P parameters, L layers, T tokens of a microbatch, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

from lightning_megatron.models import GPTConfig
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from lightning_megatron.transformer import cost

BYTES_PER_PARAMETER = 18
BYTES_PER_LOGIT = 14
# Share of the memory that is free at the start; the rest is for workspaces and for what the allocator cannot use.
USABLE = 0.94


@dataclass(frozen=True, kw_only=True)
class Shape:
    """An architecture and how much of it is trained at once."""

    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    vocabulary: int
    sequences: tuple[int, ...]
    microbatch_tokens: int
    experts: int = 0
    """Experts of a layer; 0: layers are dense."""
    top_k: int = 2
    """Experts of a token."""

    def config(self, layers: int, sequence: int) -> GPTConfig:
        moe = MoEConfig(router=RouterConfig(num_experts=self.experts, top_k=self.top_k)) if self.experts else None
        return GPTConfig(
            num_layers=layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_query_groups=self.groups,
            ffn_hidden_size=self.ffn,
            vocab_size=self.vocabulary,
            max_sequence_length=sequence,
            activation="swiglu",
            normalization="rmsnorm",
            position="rotary",
            add_bias_linear=False,
            tie_embeddings=False,
            moe=moe,
        )

    def microbatch_rows(self, sequence: int) -> int:
        return max(self.microbatch_tokens // sequence, 1)

    def needed_bytes(self, layers: int, sequence: int) -> int:
        """Bytes of device memory that a run needs, by the formula above."""
        config, rows = self.config(layers, sequence), self.microbatch_rows(sequence)
        saved = cost.layer_activation_bytes(config, batch=rows, sequence=sequence, bytes_per_element=2)
        logits = BYTES_PER_LOGIT * rows * sequence * self.vocabulary
        return BYTES_PER_PARAMETER * cost.model_parameters(config) + 2 * layers * saved + logits

    def fitting_layers(self, sequence: int, free_bytes: int) -> int:
        """Number of the shape's layers that fit; 0: none."""
        fits = (n for n in range(self.layers, 0, -1) if self.needed_bytes(n, sequence) <= USABLE * free_bytes)
        return next(fits, 0)

    def products(self, tokens: int) -> list[tuple[int, int, int]]:
        """Products of a layer's linears and of the head, in forward and backward: M, N, K of [M, K] times [K, N].

        Of experts the product of one, with as many rows as each has where all have as many.
        """
        size = self.hidden // self.heads
        rows = tokens * self.top_k // self.experts if self.experts else tokens
        forward = [
            (tokens, (self.heads + 2 * self.groups) * size, self.hidden),
            (tokens, self.hidden, self.heads * size),
            (rows, 2 * self.ffn, self.hidden),
            (rows, self.hidden, self.ffn),
            (tokens, self.vocabulary, self.hidden),
        ]
        return [way for m, n, k in forward for way in ((m, n, k), (m, k, n), (n, k, m))]


_SMOKE: dict[str, Any] = {"sequences": (32,), "microbatch_tokens": 64}
_GPU: dict[str, Any] = {"sequences": (4096, 8192), "microbatch_tokens": 8192}
SHAPES = {
    "1.3b": Shape(layers=24, hidden=2048, heads=16, groups=16, ffn=5504, vocabulary=32000, **_GPU),
    "8b": Shape(layers=32, hidden=4096, heads=32, groups=8, ffn=14336, vocabulary=128256, **_GPU),
    "8x7b": Shape(layers=32, hidden=4096, heads=32, groups=8, ffn=14336, vocabulary=32000, experts=8, **_GPU),
    "smoke": Shape(layers=2, hidden=64, heads=4, groups=2, ffn=128, vocabulary=256, **_SMOKE),
    "smoke experts": Shape(layers=2, hidden=64, heads=4, groups=2, ffn=96, vocabulary=256, experts=4, **_SMOKE),
}
