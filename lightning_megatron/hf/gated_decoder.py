"""Common parts of Llama, Mistral and Qwen: rotary positions, RMS norms, gated MLPs, and names for all of it."""

from collections.abc import Mapping
from typing import Any

from lightning_megatron.hf.blocks import each, query_key_value
from lightning_megatron.hf.config_reader import (
    HARMLESS,
    ConfigReader,
    differences,
    fields_to_hf,
    rope_faults,
    rope_to_hf,
)
from lightning_megatron.hf.family import Family, ParamMapping
from lightning_megatron.models.gpt import GPTConfig
from lightning_megatron.transformer.linears import DOWN, PROJECTION, QKV, UP

_KINDS = ("weight", "bias")

ROWS = (
    ParamMapping("embedding.tokens.weight", ("model.embed_tokens.weight",)),
    ParamMapping("layers.{}.attention_norm.weight", ("model.layers.{}.input_layernorm.weight",)),
    *(
        ParamMapping(
            f"layers.{{}}.{QKV}.{kind}",
            tuple(f"model.layers.{{}}.self_attn.{part}_proj.{kind}" for part in "qkv"),
            query_key_value,
        )
        for kind in _KINDS
    ),
    ParamMapping("layers.{}.attention.q_norm.weight", ("model.layers.{}.self_attn.q_norm.weight",)),
    ParamMapping("layers.{}.attention.k_norm.weight", ("model.layers.{}.self_attn.k_norm.weight",)),
    ParamMapping("layers.{}.mlp_norm.weight", ("model.layers.{}.post_attention_layernorm.weight",)),
    *(
        row
        for kind in _KINDS
        for row in (
            ParamMapping(f"layers.{{}}.{PROJECTION}.{kind}", (f"model.layers.{{}}.self_attn.o_proj.{kind}",)),
            ParamMapping(
                f"layers.{{}}.{UP}.{kind}",
                (f"model.layers.{{}}.mlp.gate_proj.{kind}", f"model.layers.{{}}.mlp.up_proj.{kind}"),
                each,
            ),
            ParamMapping(f"layers.{{}}.{DOWN}.{kind}", (f"model.layers.{{}}.mlp.down_proj.{kind}",)),
        )
    ),
    ParamMapping("final_norm.weight", ("model.norm.weight",)),
    ParamMapping("head.weight", ("lm_head.weight",)),
)
PREFIX = "model."
IGNORED = ("model.layers.{}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
TIED = {"lm_head.weight": "model.embed_tokens.weight"}

DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

_NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_hidden_size": "intermediate_size",
    "activation": "hidden_act",
    "norm_epsilon": "rms_norm_eps",
    "max_sequence_length": "max_position_embeddings",
    "attention_dropout": "attention_dropout",
    "init_std": "initializer_range",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
}
_CHOICES = {"activation": {"silu": "swiglu", "swish": "swiglu"}}
_OPTIONAL = {"num_query_groups": 0, "head_dim": 0, "attention_dropout": 0.0}


def family(name: str, architecture: str, **own: Any) -> Family:
    """The family of that name; `own` are its fields that others of these models do not have."""
    shared: dict[str, Any] = {"prefix": PREFIX, "rows": ROWS, "ignored": IGNORED, "tied": TIED, "harmless": HARMLESS}
    return Family(name=name, architecture=architecture, **(shared | own))


def config_from_hf(
    reader: ConfigReader, *, is_partial: bool = False, choices: Mapping[str, Mapping[str, str]] = _CHOICES
) -> dict[str, Any]:
    """Fields of a GPTConfig from a config.json, less those that a family alone has.

    `choices` are our values for their texts; `is_partial`: the family's models may rotate a part of each head.
    """
    fields = reader.take_all(_NAMES, choices, _OPTIONAL)
    return {**fields, "normalization": "rmsnorm", "add_bias_linear": False, **reader.rope(is_partial=is_partial)}


def config_to_hf(config: GPTConfig, choices: Mapping[str, Mapping[str, str]] = _CHOICES) -> dict[str, Any]:
    """Fields of a config.json from a GPTConfig, less those that a family alone has."""
    return {**fields_to_hf(config, _NAMES, choices), **rope_to_hf(config)}


def share_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Field of a config.json for the part of each head that is rotated, where that is not all of it."""
    return {} if config.rotary_fraction == 1.0 else {"partial_rotary_factor": config.rotary_fraction}


def rules(config: GPTConfig, *, own_rope: tuple[str, ...] = (), **needed: Any) -> list[str]:
    """Rules of these models that a configuration breaks, one sentence each; `needed` is what a family alone needs.

    `own_rope` are fields of rotary scalings that it writes itself.
    """
    usual = {"position": "rotary", "normalization": "rmsnorm", "activation": "swiglu", "add_bias_linear": False}
    found = differences(config, **{**usual, **needed})
    if config.rope_scaling is not None:
        found += [f"rope_scaling {fault}" for fault in rope_faults(config.rope_scaling, own_rope)]
    return found


def window_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Sliding window of a GPTConfig, one for all layers or none, as Mistral's."""
    return {"sliding_window": reader.take("sliding_window", 0)}


def window_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Field of a config.json for one sliding window."""
    return {"sliding_window": config.sliding_window or None}


def pattern_windows_from_hf(reader: ConfigReader, pattern: int) -> dict[str, Any]:
    """Sliding windows of a GPTConfig, of all layers but every `pattern`-th, unless layer_types say otherwise."""
    num_layers, window = reader.take("num_hidden_layers"), reader.take("sliding_window", 0)
    kinds = reader.take_list("layer_types", str) or None
    if kinds is None:
        sees_all = [layer for layer in range(num_layers) if (layer + 1) % pattern == 0]
    else:
        reader.note_layer_types(kinds, num_layers)
        sees_all = [layer for layer, kind in enumerate(kinds) if kind != "sliding_attention"]
    if not window or len(sees_all) == num_layers:
        return {"sliding_window": 0, "full_attention_layers": ()}
    return {"sliding_window": window, "full_attention_layers": tuple(sees_all)}


def pattern_windows_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Fields of a config.json for windows of layers that layer_types name."""
    kinds = ["sliding_attention" if config.window_of(i) else "full_attention" for i in range(config.num_layers)]
    # Even where no layer has a window transformers wants a number.
    return {"sliding_window": config.sliding_window or config.max_sequence_length, "layer_types": kinds}


def layer_windows_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Sliding windows of a GPTConfig, where layers have one each or none, as Qwen's do."""
    is_used, window = reader.take("use_sliding_window", False), reader.take("sliding_window", 0)
    num_layers, first = reader.take("num_hidden_layers"), reader.take("max_window_layers", 0)
    kinds = reader.take_list("layer_types", str) or None
    if kinds is None:
        sees_all = list(range(min(first, num_layers) if is_used and window else num_layers))
    else:
        reader.note_layer_types(kinds, num_layers)
        sees_all = [layer for layer, kind in enumerate(kinds) if kind != "sliding_attention"]
        if len(sees_all) < num_layers and not (is_used and window):
            reader.faults.append(
                f"layer_types have sliding_attention, and use_sliding_window ({is_used}) and sliding_window ({window}) "
                "say that there is none; set them, or leave layer_types out"
            )
    if len(sees_all) == num_layers:
        return {"sliding_window": 0, "full_attention_layers": ()}
    return {"sliding_window": window, "full_attention_layers": tuple(sees_all)}


def layer_windows_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Fields of a config.json for windows of layers, for every version of transformers that has them."""
    kinds = ["sliding_attention" if config.window_of(i) else "full_attention" for i in range(config.num_layers)]
    return {
        "use_sliding_window": config.sliding_window > 0,
        "sliding_window": config.sliding_window or None,
        "max_window_layers": kinds.count("full_attention"),
        "layer_types": kinds,
    }
