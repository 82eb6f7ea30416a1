"""Qwen2 and 2.5: `Qwen2ForCausalLM`, a Llama with biases of queries, keys and values, and a window for some layers."""

from typing import Any

from lightning_megatron.hf import gated_decoder
from lightning_megatron.hf.config_reader import HARMLESS, ConfigReader, dense_faults
from lightning_megatron.hf.family import Family
from lightning_megatron.models.gpt import GPTConfig

DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def config_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of a GPTConfig from a config.json."""
    fields = gated_decoder.config_from_hf(reader)
    return {**fields, "add_qkv_bias": True, **gated_decoder.window_from_hf(reader)}


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Fields of a config.json from a GPTConfig."""
    return {**gated_decoder.config_to_hf(config), **gated_decoder.window_to_hf(config)}


def rules(config: GPTConfig) -> list[str]:
    """Rules of this family that a configuration breaks, one sentence each."""
    return dense_faults(config) + gated_decoder.rules(config, add_bias_linear=False, add_qkv_bias=True)


FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
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
