"""The linears of a transformer layer: their names within the layer, and their sizes.

Adapters, FP8, the tables of Hugging Face families and the planner call them by these names.
"""

from typing import Literal, get_args

from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.latent_config import LatentConfig

LinearName = Literal[
    "attention.qkv",
    "attention.projection",
    "mlp.up",
    "mlp.down",
    "shared.up",
    "shared.down",
    "cross_attention.query",
    "cross_attention.key_value",
    "cross_attention.projection",
    "attention.query",
    "attention.query_down",
    "attention.query_up",
    "attention.key_value_down",
    "attention.key_value_up",
]
LINEAR_NAMES: tuple[LinearName, ...] = get_args(LinearName)
"""All linears: of self-attention, the dense MLP, the shared expert, a decoder's attention to its encoder, and latent
attention."""

QKV, PROJECTION, UP, DOWN, SHARED_UP, SHARED_DOWN, CROSS_QUERY, CROSS_KEY_VALUE, CROSS_PROJECTION = LINEAR_NAMES[:9]
QUERY, QUERY_DOWN, QUERY_UP, KEY_VALUE_DOWN, KEY_VALUE_UP = LINEAR_NAMES[9:]

COLUMN_PARALLEL = frozenset((QKV, UP, SHARED_UP, CROSS_QUERY, CROSS_KEY_VALUE, QUERY, QUERY_UP, KEY_VALUE_UP))
"""Linears of which ranks of tp hold output features; the others are row-parallel, but for the `REPLICATED` ones."""

REPLICATED = frozenset((QUERY_DOWN, KEY_VALUE_DOWN))
"""Linears that every rank of tp holds whole."""


def name_in_layer(name: str) -> str:
    """Name of a linear within its layer, of its name in the model: its last two steps."""
    return ".".join(name.split(".")[-2:])


def linear_sizes(config: TransformerConfig, layer: int) -> dict[LinearName, tuple[int, int]]:
    """Input and output features of each unsplit linear of a layer, counted from 0, but for those of cross attention."""
    hidden, query = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_query_groups * config.head_dim
    sizes: dict[LinearName, tuple[int, int]] = {QKV: (hidden, query + 2 * keys), PROJECTION: (query, hidden)}
    if config.latent is not None:
        sizes = latent_linear_sizes(config, config.latent)
    up, down, width = UP, DOWN, config.ffn_hidden_size
    if config.moe is not None and config.has_experts(layer):
        up, down, width = SHARED_UP, SHARED_DOWN, config.moe.shared_expert_intermediate_size
    gates = 2 if config.is_gated else 1
    return sizes | ({up: (hidden, gates * width), down: (width, hidden)} if width else {})


def latent_linear_sizes(config: TransformerConfig, latent: LatentConfig) -> dict[LinearName, tuple[int, int]]:
    """Input and output features of each unsplit linear of a layer's latent attention."""
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, latent.q_lora_rank
    queries = heads * latent.qk_head_dim
    of_queries: dict[LinearName, tuple[int, int]] = {QUERY: (hidden, queries)}
    if rank:
        of_queries = {QUERY_DOWN: (hidden, rank), QUERY_UP: (rank, queries)}
    return of_queries | {
        KEY_VALUE_DOWN: (hidden, latent.kv_lora_rank + latent.qk_rope_head_dim),
        KEY_VALUE_UP: (latent.kv_lora_rank, heads * (latent.qk_nope_head_dim + latent.v_head_dim)),
        PROJECTION: (heads * latent.v_head_dim, hidden),
    }


def cross_linear_sizes(config: TransformerConfig) -> dict[LinearName, tuple[int, int]]:
    """Input and output features of each unsplit linear of a decoder layer's cross attention."""
    hidden, query = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_query_groups * config.head_dim
    return {CROSS_QUERY: (hidden, query), CROSS_KEY_VALUE: (hidden, 2 * keys), CROSS_PROJECTION: (query, hidden)}
