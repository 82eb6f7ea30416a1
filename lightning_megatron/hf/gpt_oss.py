"""gpt-oss: `GptOssForCausalLM`, a decoder of experts with attention sinks, in which every second layer has a window."""

from typing import Any

from lightning_megatron.hf import gated_decoder
from lightning_megatron.hf.blocks import interleaved_gate_and_up, transposed_of_each
from lightning_megatron.hf.config_reader import HARMLESS, ConfigReader
from lightning_megatron.hf.expert_decoder import moe_faults, moe_from_hf, moe_to_hf
from lightning_megatron.hf.family import ParamMapping
from lightning_megatron.models.gpt import GPTConfig

_LAYER = "model.layers.{}"
_EXPERTS = f"{_LAYER}.mlp.experts"
ROWS = (
    ParamMapping("layers.{}.attention.sinks", (f"{_LAYER}.self_attn.sinks",)),
    ParamMapping("layers.{}.moe.router.weight", (f"{_LAYER}.mlp.router.weight",)),
    ParamMapping("layers.{}.moe.router.bias", (f"{_LAYER}.mlp.router.bias",)),
    ParamMapping("layers.{}.moe.experts.up", (f"{_EXPERTS}.gate_up_proj",), interleaved_gate_and_up),
    ParamMapping("layers.{}.moe.experts.up_bias", (f"{_EXPERTS}.gate_up_proj_bias",), interleaved_gate_and_up),
    ParamMapping("layers.{}.moe.experts.down", (f"{_EXPERTS}.down_proj",), transposed_of_each),
    ParamMapping("layers.{}.moe.experts.down_bias", (f"{_EXPERTS}.down_proj_bias",)),
    *gated_decoder.ROWS,
)
_CHOICES = {"activation": {"silu": "clamped_swiglu"}}
_OURS: dict[str, Any] = {"activation": "clamped_swiglu", "add_bias_linear": True, "attention_sinks": True}

DEFAULTS = {
    **gated_decoder.DEFAULTS,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def config_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of a GPTConfig from a config.json."""
    reader.take_alias("num_experts", "num_local_experts")
    reader.take_alias("experts_per_token", "num_experts_per_tok")
    reader.take("initial_context_length", 0)
    reader.require("attention_bias", True)
    reader.require("swiglu_alpha", 1.702)
    reader.require("swiglu_limit", 7, 7.0)
    if not reader.raw.get("rope_parameters") and not reader.raw.get("rope_scaling"):
        reader.raw["rope_scaling"] = _YARN
    moe = moe_from_hf(
        reader, num_experts=reader.take("num_local_experts"), norm_topk_prob=True, router={"logit_bias": True}
    )
    windows = gated_decoder.pattern_windows_from_hf(reader, 2)
    return {**gated_decoder.config_from_hf(reader, choices=_CHOICES), **_OURS, **windows, **moe}


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Fields of a config.json from a GPTConfig."""
    assert config.moe is not None
    fields = gated_decoder.config_to_hf(config, _CHOICES)
    # Without any scaling theirs would be that of its class.
    fields["rope_scaling"] = fields["rope_scaling"] or {"rope_type": "default"}
    return {
        **fields,
        **gated_decoder.pattern_windows_to_hf(config),
        "attention_bias": True,
        "intermediate_size": config.moe.ffn_hidden_size or config.ffn_hidden_size,
        "num_local_experts": config.moe.router.num_experts,
        **moe_to_hf(config.moe),
    }


def rules(config: GPTConfig) -> list[str]:
    """Rules of this family that a configuration breaks, one sentence each."""
    found = gated_decoder.rules(config, **_OURS) + moe_faults(config, logit_bias=(True,), norm_topk_prob=(True,))
    if config.moe is not None and config.has_dense_layers:
        found.append("all layers must have experts")
    return found


FAMILY = gated_decoder.family(
    "gpt_oss",
    "GptOssForCausalLM",
    rows=ROWS,
    defaults=DEFAULTS,
    harmless=HARMLESS,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=rules,
)
