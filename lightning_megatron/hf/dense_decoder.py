"""Mistral, Qwen2 (and 2.5) and Qwen3: Llamas that differ in windows, in biases, and in norms of queries and keys.

family    class of transformers    window                    beyond a Llama
mistral   MistralForCausalLM       one for all layers
qwen2     Qwen2ForCausalLM         of some layers            biases of queries, keys and values
qwen3     Qwen3ForCausalLM         of some layers            norms of queries and keys
"""

from collections.abc import Callable, Mapping
from typing import Any

from lightning_megatron.hf import gated_decoder
from lightning_megatron.hf.config_reader import NOTHING, ConfigReader, dense_faults
from lightning_megatron.hf.family import Family, ParamMapping
from lightning_megatron.models.gpt import GPTConfig

Windows = tuple[Callable[[ConfigReader], dict[str, Any]], Callable[[GPTConfig], dict[str, Any]]]
"""Fields of ours for sliding windows from theirs, and back."""

NO_WINDOW: Windows = (lambda reader: {}, lambda config: {})
_ONE_WINDOW = (gated_decoder.window_from_hf, gated_decoder.window_to_hf)
_LAYER_WINDOWS = (gated_decoder.layer_windows_from_hf, gated_decoder.layer_windows_to_hf)
_QWEN_DEFAULTS = {
    **gated_decoder.DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def dense_family(
    name: str,
    architecture: str,
    window: Windows,
    defaults: Mapping[str, Any],
    ours: Mapping[str, Any] = NOTHING,
    theirs: Mapping[str, Any] = NOTHING,
    rows: tuple[ParamMapping, ...] = (),
) -> Family:
    """A family whose models all have these values of fields of ours, and of theirs; `rows` are its own mappings."""
    window_from_hf, window_to_hf = window

    def config_from_hf(reader: ConfigReader) -> dict[str, Any]:
        for key, value in theirs.items():
            reader.require(key, value)
        return {**gated_decoder.config_from_hf(reader), **ours, **window_from_hf(reader)}

    def config_to_hf(config: GPTConfig) -> dict[str, Any]:
        return {**gated_decoder.config_to_hf(config), **theirs, **window_to_hf(config)}

    def rules(config: GPTConfig) -> list[str]:
        return dense_faults(config) + gated_decoder.rules(config, **ours)

    return gated_decoder.family(
        name,
        architecture,
        rows=rows + gated_decoder.ROWS,
        defaults=defaults,
        config_from_hf=config_from_hf,
        config_to_hf=config_to_hf,
        rules=rules,
        ruled=frozenset(("moe",)),
    )


MISTRAL = dense_family(
    "mistral",
    "MistralForCausalLM",
    _ONE_WINDOW,
    {
        **gated_decoder.DEFAULTS,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
)
QWEN2 = dense_family("qwen2", "Qwen2ForCausalLM", _LAYER_WINDOWS, _QWEN_DEFAULTS, ours={"add_qkv_bias": True})
QWEN3 = dense_family(
    "qwen3",
    "Qwen3ForCausalLM",
    _LAYER_WINDOWS,
    {**_QWEN_DEFAULTS, "head_dim": 128},
    ours={"qk_norm": True},
    theirs={"attention_bias": False},
)
