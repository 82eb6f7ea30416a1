"""GPT-2: `GPT2LMHeadModel`, with learned positions, layer norms and biases; its linears are stored as [in, out]."""

from typing import Any

from lightning_megatron.hf.blocks import joined_query_key_value, joined_query_key_value_columns, transposed
from lightning_megatron.hf.config_reader import HARMLESS, HEADS, ConfigReader, dense_faults, fields_to_hf, head_faults
from lightning_megatron.hf.family import Family, ParamMapping
from lightning_megatron.models.gpt import GPTConfig
from lightning_megatron.transformer.linears import DOWN, PROJECTION, QKV, UP

ROWS = (
    ParamMapping("embedding.tokens.weight", ("transformer.wte.weight",)),
    ParamMapping("embedding.positions.weight", ("transformer.wpe.weight",)),
    *(
        ParamMapping(f"layers.{{}}.{ours}.{kind}", (f"transformer.h.{{}}.{theirs}.{kind}",))
        for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2"))
        for kind in ("weight", "bias")
    ),
    ParamMapping(f"layers.{{}}.{QKV}.weight", ("transformer.h.{}.attn.c_attn.weight",), joined_query_key_value_columns),
    ParamMapping(f"layers.{{}}.{QKV}.bias", ("transformer.h.{}.attn.c_attn.bias",), joined_query_key_value),
    *(
        row
        for ours, theirs in (
            (PROJECTION, "attn.c_proj"),
            (UP, "mlp.c_fc"),
            (DOWN, "mlp.c_proj"),
        )
        for row in (
            ParamMapping(f"layers.{{}}.{ours}.weight", (f"transformer.h.{{}}.{theirs}.weight",), transposed),
            ParamMapping(f"layers.{{}}.{ours}.bias", (f"transformer.h.{{}}.{theirs}.bias",)),
        )
    ),
    ParamMapping("final_norm.weight", ("transformer.ln_f.weight",)),
    ParamMapping("final_norm.bias", ("transformer.ln_f.bias",)),
    ParamMapping("head.weight", ("lm_head.weight",)),
)

DEFAULTS = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}

# Names of other models' fields, which this family takes for its own too.
_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}

_NAMES = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "ffn_hidden_size": "n_inner",
    "activation": "activation_function",
    "norm_epsilon": "layer_norm_epsilon",
    "max_sequence_length": "n_positions",
    "attention_dropout": "attn_pdrop",
    "init_std": "initializer_range",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
}
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_CHOICES = {"activation": ACTIVATIONS}


def config_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of a GPTConfig from a config.json."""
    for alias, name in _ALIASES.items():
        reader.take_alias(alias, name)
    reader.require("scale_attn_weights", True)
    reader.require("scale_attn_by_inverse_layer_idx", False)
    reader.require("reorder_and_upcast_attn", False)
    reader.require("add_cross_attention", False)
    fields = reader.take_all(_NAMES, _CHOICES, {"ffn_hidden_size": 0})
    return {**fields, "hidden_dropout": reader.hidden_dropout()}


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Fields of a config.json from a GPTConfig."""
    return {
        **fields_to_hf(config, _NAMES, _CHOICES),
        "n_inner": config.ffn_hidden_size if config.ffn_hidden_size != 4 * config.hidden_size else None,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
    }


def rules(config: GPTConfig) -> list[str]:
    """Rules of this family that a configuration breaks, one sentence each."""
    found = dense_faults(config) + head_faults(config)
    if config.activation not in ACTIVATIONS.values():
        found.append(f"activation ({config.activation!r}) must be 'gelu' or 'gelu_tanh'")
    return found


FAMILY = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    rows=ROWS,
    ignored=("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias"),
    tied={"lm_head.weight": "transformer.wte.weight"},
    defaults=DEFAULTS,
    # An older name of n_positions, and the heads of other tasks.
    harmless=HARMLESS
    | {
        "n_ctx",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    },
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=rules,
    ruled=HEADS | {"moe"},
)
