"""OLMo 2: `Olmo2ForCausalLM`, a Llama that norms outputs of attention and MLP, and queries and keys over all heads."""

from lightning_megatron.hf import gated_decoder
from lightning_megatron.hf.dense_decoder import NO_WINDOW, dense_family
from lightning_megatron.hf.family import ParamMapping

FAMILY = dense_family(
    "olmo2",
    "Olmo2ForCausalLM",
    NO_WINDOW,
    {
        **gated_decoder.DEFAULTS,
        "vocab_size": 50304,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    },
    ours={"norm_placement": "output", "qk_norm": True, "qk_norm_across_heads": True},
    theirs={"attention_bias": False},
    rows=(
        ParamMapping("layers.{}.attention_output_norm.weight", ("model.layers.{}.post_attention_layernorm.weight",)),
        ParamMapping("layers.{}.mlp_output_norm.weight", ("model.layers.{}.post_feedforward_layernorm.weight",)),
    ),
)
