"""Well-known models by name, with the length of their samples and their batch, for plans without a file.

Sources: GPT-3, Brown et al., arXiv 2005.14165; GPT 1T, Narayanan et al., arXiv 2104.04473, table 1; Llama 3,
Grattafiori et al., arXiv 2407.21783; Mixtral and Qwen3, the released weights; BERT, Devlin et al., arXiv 1810.04805;
T5, Raffel et al., arXiv 1910.10683; LLaVA 1.5, Liu et al., arXiv 2310.03744.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from lightning_megatron.models import BertConfig, GPTConfig, LlavaConfig, T5Config
from lightning_megatron.models.vision import VisionConfig
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from lightning_megatron.planner.model_parts import Model, SequenceLengths


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model and how it is usually trained."""

    model: Model
    lengths: SequenceLengths
    global_batch_size: int


def _gpt(layers: int, hidden: int, heads: int, vocabulary: int, length: int) -> GPTConfig:
    return GPTConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        vocab_size=vocabulary,
        max_sequence_length=length,
        activation="gelu_tanh",
    )


def _llama(layers: int, hidden: int, heads: int, ffn: int, vocabulary: int, **others: Any) -> GPTConfig:
    fields: dict[str, Any] = {"num_query_groups": 8, "max_sequence_length": 8192, "tie_embeddings": False} | others
    return GPTConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=ffn,
        vocab_size=vocabulary,
        activation="swiglu",
        normalization="rmsnorm",
        position="rotary",
        add_bias_linear=False,
        **fields,
    )


def _experts(number: int, chosen: int, width: int = 0) -> MoEConfig:
    return MoEConfig(router=RouterConfig(num_experts=number, top_k=chosen), ffn_hidden_size=width)


def _preset(model: Model, length: int, batch: int, **lengths: Any) -> Preset:
    return Preset(model=model, lengths=SequenceLengths(sequence=length, **lengths), global_batch_size=batch)


_VICUNA = _llama(32, 4096, 32, 11008, 32000, num_query_groups=32, max_sequence_length=2048)
_VISION = VisionConfig(num_layers=24, hidden_size=1024, num_attention_heads=16, image_size=336, patch_size=14)
_MIXTRAL: dict[str, Any] = {"moe": _experts(8, 2), "max_sequence_length": 4096}
_QWEN3: dict[str, Any] = {"num_query_groups": 4, "head_dim": 128, "qk_norm": True, "moe": _experts(128, 8, 768)}
_BERT: dict[str, Any] = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 30522}
_T5: dict[str, Any] = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 128, "head_dim": 128}

PRESETS: dict[str, Preset] = {
    "gpt2_124m": _preset(_gpt(12, 768, 12, 50257, 1024), 1024, 512),
    "gpt3_175b": _preset(_gpt(96, 12288, 96, 51200, 2048), 2048, 1536),
    "gpt_1t": _preset(_gpt(128, 25600, 160, 51200, 2048), 2048, 3072),
    "llama3_8b": _preset(_llama(32, 4096, 32, 14336, 128256), 8192, 128),
    "llama3_70b": _preset(_llama(80, 8192, 64, 28672, 128256), 8192, 256),
    "llama3_405b": _preset(_llama(126, 16384, 128, 53248, 128256), 8192, 2048),
    "mixtral_8x7b": _preset(_llama(32, 4096, 32, 14336, 32000, **_MIXTRAL), 4096, 1024),
    "mixtral_8x22b": _preset(_llama(56, 6144, 48, 16384, 32000, **_MIXTRAL), 4096, 1024),
    "qwen3_30b_a3b": _preset(_llama(48, 2048, 32, 6144, 151936, **_QWEN3, max_sequence_length=4096), 4096, 512),
    "bert_large": _preset(BertConfig(**_BERT), 512, 256),
    "t5_11b": _preset(T5Config(**_T5, ffn_hidden_size=65536, vocab_size=32128), 512, 2048, decoder_sequence=114),
    "llava_7b": _preset(LlavaConfig.of(_VICUNA, vision=_VISION, image_token=32000), 2048, 128, images=1),
}


def preset_of(name: str) -> Preset:
    """The preset of that name. Raises ValueError with all names for any other."""
    if name in PRESETS:
        return PRESETS[name]
    nearest = get_close_matches(name, PRESETS, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ";"
    raise ValueError(f"preset {name!r} is not known{hint} presets are {', '.join(PRESETS)}")
