"""The linears of a transformer layer: their names within the layer, and their sizes.

Adapters, FP8, the tables of Hugging Face families and the planner call them by these names.
"""

from typing import Literal, get_args

from lightning_megatron.transformer.config import TransformerConfig

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
]
LINEAR_NAMES: tuple[LinearName, ...] = get_args(LinearName)
"""All linears: of self-attention, the dense MLP, the shared expert, and a decoder's attention to its encoder."""

QKV, PROJECTION, UP, DOWN, SHARED_UP, SHARED_DOWN, CROSS_QUERY, CROSS_KEY_VALUE, CROSS_PROJECTION = LINEAR_NAMES

COLUMN_PARALLEL = frozenset((QKV, UP, SHARED_UP, CROSS_QUERY, CROSS_KEY_VALUE))
"""Linears of which ranks of tp hold output features; the others are row-parallel."""


def name_in_layer(name: str) -> str:
    """Name of a linear within its layer, of its name in the model: its last two steps."""
    return ".".join(name.split(".")[-2:])


def linear_sizes(config: TransformerConfig, layer: int) -> dict[LinearName, tuple[int, int]]:
    """Input and output features of each unsplit linear of a layer, counted from 0, but for those of cross attention."""
    hidden, query = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_query_groups * config.head_dim
    sizes = {QKV: (hidden, query + 2 * keys), PROJECTION: (query, hidden)}
    up, down, width = UP, DOWN, config.ffn_hidden_size
    if config.moe is not None and config.has_experts(layer):
        up, down, width = SHARED_UP, SHARED_DOWN, config.moe.shared_expert_intermediate_size
    gates = 2 if config.is_gated else 1
    return sizes | ({up: (hidden, gates * width), down: (width, hidden)} if width else {})


def cross_linear_sizes(config: TransformerConfig) -> dict[LinearName, tuple[int, int]]:
    """Input and output features of each unsplit linear of a decoder layer's cross attention."""
    hidden, query = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_query_groups * config.head_dim
    return {CROSS_QUERY: (hidden, query), CROSS_KEY_VALUE: (hidden, 2 * keys), CROSS_PROJECTION: (query, hidden)}
