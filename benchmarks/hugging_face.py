"""Hugging Face's Llama, or Mixtral where layers have experts, of one of our architectures, with torch's attention."""

from typing import Any

from torch import nn

from lightning_megatron.models import GPTConfig


def build_hugging_face(config: GPTConfig, *, experts: str = "grouped_mm") -> nn.Module:
    """The model as it comes; `experts` is its name of how experts multiply: "eager", one by one, or "grouped_mm"."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    settings: dict[str, Any] = {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_sequence_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": False,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    if config.moe is None:
        return LlamaForCausalLM(LlamaConfig(**settings, intermediate_size=config.ffn_hidden_size))
    return MixtralForCausalLM(
        MixtralConfig(
            **settings,
            intermediate_size=config.moe.ffn_hidden_size or config.ffn_hidden_size,
            num_local_experts=config.moe.router.num_experts,
            num_experts_per_tok=config.moe.router.top_k,
            sliding_window=None,
            experts_implementation=experts,
        )
    )
