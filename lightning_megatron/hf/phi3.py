"""Phi-3 and Phi-4: `Phi3ForCausalLM`, a Mistral with fused linears that may rotate a part of each head."""

from typing import Any

from lightning_megatron.hf import gated_decoder
from lightning_megatron.hf.blocks import joined, joined_query_key_value
from lightning_megatron.hf.config_reader import HARMLESS, ConfigReader, dense_faults
from lightning_megatron.hf.family import ParamMapping
from lightning_megatron.models.gpt import GPTConfig
from lightning_megatron.transformer.linears import QKV, UP

DEFAULTS = {
    **gated_decoder.DEFAULTS,
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}

# What published files say of parts that no model of the family has.
_ABSENT = {
    "attention_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
}


def config_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of a GPTConfig from a config.json."""
    # It acts under rotary scalings alone, of which none is built.
    reader.taken.add("original_max_position_embeddings")
    for key, value in _ABSENT.items():
        reader.require(key, value)
    fields = gated_decoder.config_from_hf(reader, is_partial=True) | gated_decoder.window_from_hf(reader)
    if fields["rope_scaling"] is not None:
        reader.faults.append("rope_scaling must be null: longrope, the one that the family's models have, is not built")
    return {**fields, "hidden_dropout": reader.hidden_dropout()}


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Fields of a config.json from a GPTConfig."""
    return {
        **gated_decoder.config_to_hf(config),
        **gated_decoder.window_to_hf(config),
        **gated_decoder.share_to_hf(config),
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
    }


def rules(config: GPTConfig) -> list[str]:
    """Rules of this family that a configuration breaks, one sentence each."""
    return dense_faults(config) + gated_decoder.rules(config, rope_scaling=None)


FAMILY = gated_decoder.family(
    "phi3",
    "Phi3ForCausalLM",
    rows=(
        ParamMapping(
            f"layers.{{}}.{QKV}.weight", ("model.layers.{}.self_attn.qkv_proj.weight",), joined_query_key_value
        ),
        ParamMapping(f"layers.{{}}.{UP}.weight", ("model.layers.{}.mlp.gate_up_proj.weight",), joined),
        *gated_decoder.ROWS,
    ),
    defaults=DEFAULTS,
    harmless=HARMLESS,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=rules,
    ruled=frozenset(("moe",)),
    # With whole heads turned it is a Mistral under other names.
    gives_way=True,
)
