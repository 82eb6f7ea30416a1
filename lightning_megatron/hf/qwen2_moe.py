"""Qwen2-MoE: `Qwen2MoeForCausalLM`, a Qwen2 with experts in all layers or in some, and a gated shared expert."""

from typing import Any

from lightning_megatron.hf import gated_decoder
from lightning_megatron.hf.blocks import each
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
from lightning_megatron.hf.family import ParamMapping
from lightning_megatron.models.gpt import GPTConfig

_SHARED = "model.layers.{}.mlp.shared_expert"
_ROWS = (
    *gated_decoder.ROWS,
    ParamMapping("layers.{}.moe.shared.up.weight", (f"{_SHARED}.gate_proj.weight", f"{_SHARED}.up_proj.weight"), each),
    ParamMapping("layers.{}.moe.shared.down.weight", (f"{_SHARED}.down_proj.weight",)),
    ParamMapping("layers.{}.moe.shared.gate", (f"{_SHARED}_gate.weight",)),
)

DEFAULTS = {
    **QWEN_DEFAULTS,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}


def config_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of a GPTConfig from a config.json."""
    reader.require("qkv_bias", True)
    if reader.take("use_sliding_window", False) and not reader.take_list("layer_types", str):
        reader.faults.append("layer_types must be there where use_sliding_window is True: versions differ without them")
    windows = gated_decoder.layer_windows_from_hf(reader)
    moe = moe_from_hf(
        reader,
        num_experts=reader.take("num_experts"),
        norm_topk_prob=reader.take("norm_topk_prob", False),
        ffn_hidden_size=reader.take("moe_intermediate_size"),
        layers=layers_from_hf(reader),
        shared_expert_intermediate_size=reader.take("shared_expert_intermediate_size"),
        shared_expert_gate=True,
    )
    return {**gated_decoder.config_from_hf(reader), "add_qkv_bias": True, **windows, **moe}


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Fields of a config.json from a GPTConfig."""
    moe = config.moe
    assert moe is not None
    return {
        **gated_decoder.config_to_hf(config),
        **gated_decoder.layer_windows_to_hf(config),
        "qkv_bias": True,
        "num_experts": moe.router.num_experts,
        "norm_topk_prob": moe.router.norm_topk_prob,
        "moe_intermediate_size": moe.ffn_hidden_size or config.ffn_hidden_size,
        "shared_expert_intermediate_size": moe.shared_expert_intermediate_size,
        **layers_to_hf(config),
        **moe_to_hf(moe),
    }


def rules(config: GPTConfig) -> list[str]:
    """Rules of this family that a configuration breaks, one sentence each."""
    found = moe_faults(config, shared_expert_intermediate_size=(), shared_expert_gate=(True,))
    return found + gated_decoder.rules(config, add_qkv_bias=True)


FAMILY = gated_decoder.family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    rows=_ROWS + rows_apart("mlp", "gate_proj", "up_proj", "down_proj"),
    other_rows=_ROWS + ROWS_TOGETHER,
    defaults=DEFAULTS,
    harmless=HARMLESS,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=rules,
)
