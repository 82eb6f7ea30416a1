"""GLM-4: `Glm4ForCausalLM`, with norms around attention and MLP; of a part of each head neighbours turn as a pair."""

from typing import Any

from lightning_megatron.hf import gated_decoder
from lightning_megatron.hf.blocks import interleaved_query_key_value, joined
from lightning_megatron.hf.config_reader import HARMLESS, ConfigReader, dense_faults
from lightning_megatron.hf.family import ParamMapping
from lightning_megatron.models.gpt import GPTConfig
from lightning_megatron.transformer.linears import QKV, UP

_LAYER = "model.layers.{}"

ROWS = (
    *(
        ParamMapping(
            f"layers.{{}}.{QKV}.{kind}",
            tuple(f"{_LAYER}.self_attn.{part}_proj.{kind}" for part in "qkv"),
            interleaved_query_key_value,
        )
        for kind in ("weight", "bias")
    ),
    ParamMapping(f"layers.{{}}.{UP}.weight", (f"{_LAYER}.mlp.gate_up_proj.weight",), joined),
    ParamMapping("layers.{}.attention_output_norm.weight", (f"{_LAYER}.post_self_attn_layernorm.weight",)),
    ParamMapping("layers.{}.mlp_output_norm.weight", (f"{_LAYER}.post_mlp_layernorm.weight",)),
    *gated_decoder.ROWS,
)

DEFAULTS = {
    **gated_decoder.DEFAULTS,
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}


def config_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of a GPTConfig from a config.json."""
    fields = gated_decoder.config_from_hf(reader, is_partial=True)
    return {**fields, "norm_placement": "sandwich", "add_qkv_bias": reader.take("attention_bias")}


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Fields of a config.json from a GPTConfig."""
    return {
        **gated_decoder.config_to_hf(config),
        "partial_rotary_factor": config.rotary_fraction,
        "attention_bias": config.add_qkv_bias,
    }


def rules(config: GPTConfig) -> list[str]:
    """Rules of this family that a configuration breaks, one sentence each."""
    return dense_faults(config) + gated_decoder.rules(config, norm_placement="sandwich")


FAMILY = gated_decoder.family(
    "glm4",
    "Glm4ForCausalLM",
    rows=ROWS,
    defaults=DEFAULTS,
    harmless=HARMLESS,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=rules,
    ruled=frozenset(("moe",)),
)
