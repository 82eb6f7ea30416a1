"""Mistral: `MistralForCausalLM`, a Llama with one window for all layers, or none."""

from typing import Any

from lightning_megatron.hf import gated_decoder
from lightning_megatron.hf.config_reader import HARMLESS, ConfigReader, dense_faults
from lightning_megatron.hf.family import Family
from lightning_megatron.models.gpt import GPTConfig

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
}


def config_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of a GPTConfig from a config.json."""
    return {**gated_decoder.config_from_hf(reader), "sliding_window": reader.take("sliding_window", 0)}


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Fields of a config.json from a GPTConfig."""
    return {**gated_decoder.config_to_hf(config), "sliding_window": config.sliding_window or None}


def rules(config: GPTConfig) -> list[str]:
    """Rules of this family that a configuration breaks, one sentence each."""
    return dense_faults(config) + gated_decoder.rules(config, add_bias_linear=False)


FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    prefix=gated_decoder.PREFIX,
    rows=gated_decoder.ROWS,
    ignored=gated_decoder.IGNORED,
    tied=gated_decoder.TIED,
    defaults=DEFAULTS,
    harmless=HARMLESS,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=rules,
    ruled=frozenset(("moe",)),
)
