"""Qwen3-MoE: `Qwen3MoeForCausalLM`, a Qwen3 with experts in all layers or in some, and one window for all or none."""

from typing import Any

from lightning_megatron.hf import gated_decoder
from lightning_megatron.hf.config_reader import HARMLESS, ConfigReader
from lightning_megatron.hf.expert_decoder import (
    QWEN_DEFAULTS,
    ROWS_TOGETHER,
    layers_from_hf,
    layers_to_hf,
    moe_faults,
    moe_from_hf,
    moe_to_hf,
    rows_apart,
)
from lightning_megatron.models.gpt import GPTConfig

DEFAULTS = {
    **QWEN_DEFAULTS,
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def config_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of a GPTConfig from a config.json."""
    reader.require("attention_bias", False)
    reader.take_alias("num_local_experts", "num_experts")
    moe = moe_from_hf(
        reader,
        num_experts=reader.take("num_experts"),
        norm_topk_prob=reader.take("norm_topk_prob", False),
        ffn_hidden_size=reader.take("moe_intermediate_size"),
        layers=layers_from_hf(reader),
    )
    return {**gated_decoder.config_from_hf(reader), "qk_norm": True, **_window_from_hf(reader), **moe}


def _window_from_hf(reader: ConfigReader) -> dict[str, Any]:
    is_used, window = reader.take("use_sliding_window", False), reader.take("sliding_window", 0)
    if is_used and window:
        # Older versions of transformers left the window out of so many first layers, newer ones do not.
        reader.require("max_window_layers", 0)
        return {"sliding_window": window}
    reader.taken.add("max_window_layers")
    return {"sliding_window": 0}


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Fields of a config.json from a GPTConfig."""
    moe = config.moe
    assert moe is not None
    return {
        **gated_decoder.config_to_hf(config),
        "attention_bias": False,
        "use_sliding_window": config.sliding_window > 0,
        "sliding_window": config.sliding_window or None,
        "max_window_layers": 0,
        "num_experts": moe.router.num_experts,
        "norm_topk_prob": moe.router.norm_topk_prob,
        "moe_intermediate_size": moe.ffn_hidden_size or config.ffn_hidden_size,
        **layers_to_hf(config),
        **moe_to_hf(moe),
    }


def rules(config: GPTConfig) -> list[str]:
    """Rules of this family that a configuration breaks, one sentence each."""
    return moe_faults(config) + gated_decoder.rules(config, qk_norm=True)


FAMILY = gated_decoder.family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    rows=gated_decoder.ROWS + rows_apart("mlp", "gate_proj", "up_proj", "down_proj"),
    other_rows=gated_decoder.ROWS + ROWS_TOGETHER,
    defaults=DEFAULTS,
    harmless=HARMLESS,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=rules,
)
