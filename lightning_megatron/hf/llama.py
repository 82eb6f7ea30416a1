"""Llama 1, 2 and 3: `LlamaForCausalLM`."""

from typing import Any

from lightning_megatron.hf import gated_decoder
from lightning_megatron.hf.config_reader import HARMLESS, ConfigReader, dense_faults
from lightning_megatron.models.gpt import GPTConfig

DEFAULTS = {
    **gated_decoder.DEFAULTS,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
}


def config_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of a GPTConfig from a config.json."""
    fields = gated_decoder.config_from_hf(reader)
    of_attention, of_mlp = reader.take("attention_bias", False), reader.take("mlp_bias", False)
    if of_attention != of_mlp:
        reader.faults.append(
            f"attention_bias ({of_attention}) and mlp_bias ({of_mlp}) must be equal: all linears of a layer have a "
            "bias, or none"
        )
    return {**fields, "add_bias_linear": of_attention}


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Fields of a config.json from a GPTConfig."""
    biases = {"attention_bias": config.add_bias_linear, "mlp_bias": config.add_bias_linear}
    return {**gated_decoder.config_to_hf(config), **biases}


def rules(config: GPTConfig) -> list[str]:
    """Rules of this family that a configuration breaks, one sentence each."""
    found = dense_faults(config) + gated_decoder.rules(config, add_bias_linear=config.add_bias_linear)
    if config.add_qkv_bias and not config.add_bias_linear:
        found.append("add_qkv_bias (True) must be False where add_bias_linear is")
    if config.hidden_size % config.num_attention_heads:
        found.append(
            f"hidden_size ({config.hidden_size}) must be a multiple of num_attention_heads "
            f"({config.num_attention_heads})"
        )
    return found


FAMILY = gated_decoder.family(
    "llama",
    "LlamaForCausalLM",
    defaults=DEFAULTS,
    # How a linear was once cut for exact replication of a training; the sums are the same.
    harmless=HARMLESS | {"pretraining_tp"},
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=rules,
    ruled=frozenset(("moe", "add_qkv_bias")),
)
