"""Tiny random models of transformers, one for each thing that a family can do, and ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from lightning_megatron import hf
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPTModel

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCABULARY = 131
# Longer than two of the short windows below, and than the original length of the scaled rotations.
SEQUENCE = 29

_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GATED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_QWEN = {**_GATED, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 7}


# As narrow as the other dense layers in no size, so that none is taken for another.
_MIXTRAL = {**_GATED, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}
_QWEN_MOE = {**_GATED, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 12}
_QWEN2_MOE = {
    **_GATED,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}


_GEMMA = {
    **_GATED,
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
    "pad_token_id": None,
    "tie_word_embeddings": True,
}


_GPT_OSS = {
    **_GATED,
    "head_dim": 12,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 20,
    "sliding_window": 7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


_DEEPSEEK = {
    **_GATED,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": kind, **settings}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT2),
    "gpt2 untied, narrow, exact gelu": (
        "gpt2",
        {**_GPT2, "tie_word_embeddings": False, "n_inner": 24, "activation_function": "gelu"},
    ),
    "llama": ("llama", _GATED),
    "llama tied, a key head for each, large heads": (
        "llama",
        {**_GATED, "tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 24},
    ),
    "llama with biases": ("llama", {**_GATED, "attention_bias": True, "mlp_bias": True}),
    "llama 3": (
        "llama",
        {
            **_GATED,
            **_rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        },
    ),
    "llama linear": ("llama", {**_GATED, **_rope("linear", factor=4.0)}),
    "llama yarn": ("llama", {**_GATED, **_rope("yarn", factor=4.0, original_max_position_embeddings=16)}),
    "llama yarn, all settings": (
        "llama",
        {
            **_GATED,
            "head_dim": 32,
            "max_position_embeddings": 256,
            **_rope(
                "yarn",
                factor=4.0,
                # So that the line begins between two waves and not before the first.
                original_max_position_embeddings=64,
                beta_fast=3.0,
                beta_slow=0.5,
                attention_factor=0.8,
            ),
        },
    ),
    "mistral": ("mistral", {**_GATED, "sliding_window": 5}),
    "mistral, a window of half the sequence": ("mistral", {**_GATED, "sliding_window": 15}),
    "mistral, a window of all": ("mistral", {**_GATED, "sliding_window": SEQUENCE}),
    "mistral without a window": ("mistral", {**_GATED, "sliding_window": None}),
    "qwen2": ("qwen2", {**_QWEN, "use_sliding_window": False}),
    "qwen2 tied, two layers with a window": ("qwen2", {**_QWEN, "max_window_layers": 2, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**_QWEN, "use_sliding_window": False, "head_dim": 16}),
    "qwen3, a window in turns": (
        "qwen3",
        {**_QWEN, "head_dim": 12, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "mixtral": ("mixtral", {**_MIXTRAL, "router_jitter_noise": 0.1}),
    "mixtral tied, with a window, top 3": (
        "mixtral",
        {**_MIXTRAL, "tie_word_embeddings": True, "sliding_window": 5, "num_experts_per_tok": 3},
    ),
    "gemma2": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2 without caps, all layers alike": (
        "gemma2",
        {
            **_GEMMA,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention"] * 2,
            "sliding_window": 64,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **_GEMMA,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gpt_oss": ("gpt_oss", _GPT_OSS),
    "gpt_oss, stretched waves, other windows": (
        "gpt_oss",
        {
            **_GPT_OSS,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            **_rope("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False),
        },
    ),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "deepseek_v3, whole queries, one group, stretched waves": (
        "deepseek_v3",
        {
            **_DEEPSEEK,
            # Norms of latents have 1e-6 whatever it says.
            "rms_norm_eps": 1e-2,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            **_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                beta_fast=32.0,
                beta_slow=1.0,
                mscale=0.8,
                mscale_all_dim=1.0,
            ),
        },
    ),
    "olmo2": ("olmo2", {**_GATED, "num_key_value_heads": 4, "pad_token_id": None}),
    "glm4": ("glm4", {**_GATED, "head_dim": 12, "pad_token_id": None}),
    "glm4 tied, without biases": (
        "glm4",
        {**_GATED, "head_dim": 16, "attention_bias": False, "tie_word_embeddings": True, "pad_token_id": None},
    ),
    "phi3": ("phi3", {**_GATED, "sliding_window": 7, "pad_token_id": None}),
    "phi3, a part of each head turns": (
        "phi3",
        {**_GATED, "hidden_size": 48, "partial_rotary_factor": 0.5, "tie_word_embeddings": True, "pad_token_id": None},
    ),
    "qwen2_moe": ("qwen2_moe", {**_QWEN2_MOE, "norm_topk_prob": True}),
    "qwen2_moe, some layers dense, a window in turns": (
        "qwen2_moe",
        {**_QWEN2_MOE, "num_hidden_layers": 4, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 7},
    ),
    "qwen3_moe": ("qwen3_moe", {**_QWEN_MOE, "norm_topk_prob": True}),
    "qwen3_moe, weights as they are, one expert of a token": ("qwen3_moe", {**_QWEN_MOE, "num_experts_per_tok": 1}),
    "qwen3_moe, some layers dense, with a window": (
        "qwen3_moe",
        {
            **_QWEN_MOE,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": 7,
            "tie_word_embeddings": True,
        },
    ),
}


def theirs(case: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of transformers, with numbers that make every weight matter."""
    kind, fields = CASES[case]
    config = transformers.AutoConfig.for_model(kind, **fields)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        biases = [one for name, one in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for bias in biases:
            bias.copy_(torch.randn(bias.shape, generator=generator) * 0.2)
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    return model.to(dtype)


def saved(case: str, folder: Path, **options: Any) -> PreTrainedModel:
    """The same, also saved in the folder."""
    model = theirs(case)
    model.save_pretrained(folder, **options)
    return model


def family_of(case: str) -> str:
    return CASES[case][0]


def tokens() -> Tensor:
    """A batch [2, sequence]."""
    return torch.randint(VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def logits(model: PreTrainedModel | GPTModel) -> Tensor:
    """Those of the batch."""
    output = model(tokens())
    found: Tensor = output if isinstance(output, Tensor) else output.logits
    return found


def ours(folder: Path, dtype: torch.dtype = torch.float32) -> GPTModel:
    """Our model on one device."""
    with default_dtype(dtype):
        return hf.from_pretrained(folder, Mesh.single()).eval()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch's default dtype within the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder and what is in it."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
