"""Multi-head latent attention as a cost: parameters, products and FLOPs of a layer, by its sizes.

Queries, and keys with values, go through a narrow product, a norm and a wide one; a part of each key, which has rotary
embeddings, is one for all heads. The narrow products are not cut by tp.

    query     H -> q_lora_rank -> A (qk_nope_head_dim + qk_rope_head_dim)        q_lora_rank 0: one product
    key       H -> kv_lora_rank + qk_rope_head_dim,  kv_lora_rank -> A (qk_nope_head_dim + v_head_dim)
    output    A v_head_dim -> H

H hidden, A heads. Source: DeepSeek-AI, arXiv 2412.19437, section 2.1.1.
"""

from dataclasses import dataclass

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.models import GPTConfig


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-head latent attention."""

    q_lora_rank: int = 1536
    """Features of the narrow query; 0: queries have one product."""
    kv_lora_rank: int = 512
    """Features of the narrow key and value."""
    qk_nope_head_dim: int = 128
    """Size of a head's queries and keys without rotary embeddings."""
    qk_rope_head_dim: int = 64
    """Size of a head's queries, and of the key of all heads, with rotary embeddings."""
    v_head_dim: int = 128
    """Size of a head's values."""

    @property
    def qk_head_dim(self) -> int:
        """Size of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def narrow(self) -> int:
        """Features of the outputs of the narrow products."""
        return self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim

    def products(self, hidden: int, heads: int, tp: int = 1) -> list[tuple[int, int, bool]]:
        """Inputs and outputs of the products of a token on a rank, each with whether it is narrow."""
        own = heads // tp
        of_queries = [(self.q_lora_rank or hidden, own * self.qk_head_dim, False)]
        if self.q_lora_rank:
            of_queries = [(hidden, self.q_lora_rank, True), *of_queries]
        return [
            *of_queries,
            (hidden, self.kv_lora_rank + self.qk_rope_head_dim, True),
            (self.kv_lora_rank, own * (self.qk_nope_head_dim + self.v_head_dim), False),
            (own * self.v_head_dim, hidden, False),
        ]

    def parameters(self, hidden: int, heads: int, tp: int = 1) -> int:
        """Number of parameters of a layer's attention on a rank, its norms of narrow features included."""
        return sum(m * n for m, n, _ in self.products(hidden, heads, tp)) + self.q_lora_rank + self.kv_lora_rank


@config_dataclass
class LatentGPTConfig(GPTConfig):
    """A GPT with multi-head latent attention, which the planner times and the package does not build."""

    latent: LatentAttention
    """Sizes of its attention."""
