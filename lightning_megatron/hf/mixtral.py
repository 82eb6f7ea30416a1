"""Mixtral: `MixtralForCausalLM`, a Mistral with experts in all layers, whose weights sum up to 1 for each token."""

from typing import Any

from lightning_megatron.hf import gated_decoder
from lightning_megatron.hf.config_reader import HARMLESS, ConfigReader
from lightning_megatron.hf.expert_decoder import ROWS_TOGETHER, moe_faults, moe_from_hf, moe_to_hf, rows_apart
from lightning_megatron.models.gpt import GPTConfig

DEFAULTS = {
    **gated_decoder.DEFAULTS,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
}


def config_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of a GPTConfig from a config.json."""
    reader.take_alias("num_experts", "num_local_experts")
    moe = moe_from_hf(
        reader,
        num_experts=reader.take("num_local_experts"),
        norm_topk_prob=True,
        jitter=reader.take("router_jitter_noise", 0.0),
    )
    return {**gated_decoder.config_from_hf(reader), **gated_decoder.window_from_hf(reader), **moe}


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Fields of a config.json from a GPTConfig."""
    assert config.moe is not None
    return {
        **gated_decoder.config_to_hf(config),
        **gated_decoder.window_to_hf(config),
        "intermediate_size": config.moe.ffn_hidden_size or config.ffn_hidden_size,
        "num_local_experts": config.moe.router.num_experts,
        "router_jitter_noise": float(config.moe.router.jitter),
        **moe_to_hf(config.moe),
    }


def rules(config: GPTConfig) -> list[str]:
    """Rules of this family that a configuration breaks, one sentence each."""
    found = gated_decoder.rules(config) + moe_faults(config)
    if config.moe is not None:
        if not config.moe.router.norm_topk_prob:
            found.append("moe norm_topk_prob (False) must be True")
        dense = [layer for layer in range(config.num_layers) if not config.has_experts(layer)]
        if dense:
            found.append(f"layers {', '.join(map(str, dense))} must have experts, as all others")
    return found


FAMILY = gated_decoder.family(
    "mixtral",
    "MixtralForCausalLM",
    rows=gated_decoder.ROWS + rows_apart("block_sparse_moe", "w1", "w3", "w2"),
    other_rows=gated_decoder.ROWS + ROWS_TOGETHER,
    defaults=DEFAULTS,
    harmless=HARMLESS,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=rules,
)
