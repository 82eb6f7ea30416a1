"""Qwen3: `Qwen3ForCausalLM`, a Llama with norms of queries and keys, and a window for some layers."""

from typing import Any

from lightning_megatron.hf import gated_decoder
from lightning_megatron.hf.config_reader import HARMLESS, ConfigReader, dense_faults
from lightning_megatron.hf.family import Family
from lightning_megatron.hf.qwen2 import DEFAULTS
from lightning_megatron.models.gpt import GPTConfig


def config_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of a GPTConfig from a config.json."""
    reader.require("attention_bias", False)
    fields = gated_decoder.config_from_hf(reader)
    return {**fields, "qk_norm": True, **gated_decoder.window_from_hf(reader)}


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Fields of a config.json from a GPTConfig."""
    return {**gated_decoder.config_to_hf(config), "attention_bias": False, **gated_decoder.window_to_hf(config)}


def rules(config: GPTConfig) -> list[str]:
    """Rules of this family that a configuration breaks, one sentence each."""
    return dense_faults(config) + gated_decoder.rules(config, add_bias_linear=False, qk_norm=True)


FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    prefix=gated_decoder.PREFIX,
    rows=gated_decoder.ROWS,
    ignored=gated_decoder.IGNORED,
    tied=gated_decoder.TIED,
    defaults={**DEFAULTS, "head_dim": 128},
    harmless=HARMLESS,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=rules,
    ruled=frozenset(("moe",)),
)
