"""The small twin of a configuration: the same architecture with few layers and small sizes.

A model that is built in `configure_model` from a configuration among the module's attributes or hyper-parameters is
small then: that of this package's models, or of Hugging Face's.
"""

import re
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from lightning_megatron.models import LlavaConfig
from lightning_megatron.moe.config import MoEConfig
from lightning_megatron.pipeline.microbatches import map_tensors
from lightning_megatron.testing.subject import MakeSubject, Subject, SubjectError
from lightning_megatron.transformer.config import LanguageModelConfig, TransformerConfig

LAYERS, HEADS, HEAD_DIM, FFN, EXPERTS = 4, 4, 8, 64, 8
HIDDEN = HEADS * HEAD_DIM
# No tensor-parallel size divides it, so that padding of the vocabulary is met too.
VOCABULARY = 1031
SEQUENCE = 64


@runtime_checkable
class PretrainedConfig(Protocol):
    """A configuration of Hugging Face's transformers."""

    model_type: str

    def to_dict(self) -> dict[str, Any]:
        """All of its fields."""
        ...

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> "PretrainedConfig":
        """A configuration of these fields."""
        ...


@dataclass(frozen=True, kw_only=True)
class TinyTwin:
    """Makes a subject whose model, and whose batches, are small."""

    make: MakeSubject

    def __call__(self) -> Subject:
        subject = self.make()
        module = subject.module
        holders: list[Any] = [module.hparams, vars(module)]
        found = [(held, name, value) for held in holders for name, value in held.items() if _is_config(value)]
        if not found:
            raise SubjectError(
                f"--tiny shrinks a configuration among the attributes of {type(module).__name__}, and there is none; "
                "keep your GPTConfig, or Hugging Face configuration, as self.config and build the model from it in "
                "configure_model"
            )
        if built := sum(parameter.numel() for parameter in module.parameters()):
            raise SubjectError(
                f"--tiny shrinks a configuration before the model is built, and {type(module).__name__} builds "
                f"{built:,} parameters in __init__; build the model in configure_model"
            )
        for held, name, value in found:
            held[name] = twin_of(value)
        has_images = any(isinstance(value, LlavaConfig) for _, _, value in found)
        note = f"a small twin was trained: {LAYERS} layers of {HIDDEN} features at most" + (
            "" if has_images else f", {VOCABULARY} tokens, sequences of {SEQUENCE}"
        )
        return replace(subject, notes=(*subject.notes, note), change_batch=None if has_images else clipped)


def _is_config(value: Any) -> bool:
    return isinstance(value, (TransformerConfig, PretrainedConfig))


def twin_of(config: Any) -> Any:
    """The small twin of a configuration of this package or of Hugging Face."""
    return _package_twin(config) if isinstance(config, TransformerConfig) else _pretrained_twin(config)


def _package_twin(config: TransformerConfig) -> TransformerConfig:
    layers = min(config.num_layers, LAYERS)
    heads = min(config.num_attention_heads, HEADS)
    known = {field.name for field in fields(config)}
    small: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": HIDDEN,
        "num_attention_heads": heads,
        "num_query_groups": heads if config.num_query_groups == config.num_attention_heads else max(1, heads // 2),
        "head_dim": HEAD_DIM,
        "ffn_hidden_size": FFN,
        "sliding_window": min(config.sliding_window, SEQUENCE // 4),
        "full_attention_layers": tuple(layer for layer in config.full_attention_layers if layer < layers),
        "moe": None if config.moe is None else _moe_twin(config.moe, layers),
    }
    if isinstance(config, LlavaConfig):
        # Images have so many tokens as they have, and one token stands for them.
        small["vision"] = replace(
            config.vision,
            num_layers=max(2, min(config.vision.num_layers, LAYERS)),
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            num_query_groups=HEADS,
            head_dim=HEAD_DIM,
            ffn_hidden_size=FFN,
        )
    else:
        # The longest sequence stays, as the data may be told of it; batches are cut.
        if isinstance(config, LanguageModelConfig):
            small["vocab_size"] = min(config.vocab_size, VOCABULARY)
    if "num_decoder_layers" in known:
        small["num_decoder_layers"] = min(config.num_decoder_layers, LAYERS)  # type: ignore[attr-defined]
    return replace(config, **small)


def _moe_twin(moe: MoEConfig, layers: int) -> MoEConfig:
    router = moe.router
    groups = min(router.num_groups, 2)
    experts = min(router.num_experts, EXPERTS)
    chosen = min(router.group_topk, groups)
    return replace(
        moe,
        router=replace(
            router,
            num_experts=experts,
            num_groups=groups,
            group_topk=chosen,
            top_k=min(router.top_k, chosen * experts // groups, 2),
        ),
        ffn_hidden_size=min(moe.ffn_hidden_size, FFN // 2),
        layer_freq=min(moe.layer_freq, layers),
        layers=tuple(layer for layer in moe.layers if layer < layers) or (layers - 1,) * bool(moe.layers),
        shared_expert_intermediate_size=min(moe.shared_expert_intermediate_size, FFN // 2),
    )


# Largest values of fields by what their names end in; the first pattern counts.
_PRETRAINED = tuple(
    (re.compile(pattern), most)
    for pattern, most in {
        r".*(layers|n_layer|num_blocks|depth|num_layers_per_stack)": LAYERS,
        r"(?!num_).*vocab(_size)?(_per_layer_input)?": VOCABULARY,
        r".*(max_position_embeddings|n_positions|n_ctx|context_length|max_seq_len)": SEQUENCE,
        r"max_(source|target)_positions": SEQUENCE,
        r".*(sliding_window|window_size|chunk_size|block_size|chunk_length|window_len)": SEQUENCE // 4,
        r".*(experts|experts_num|expert_num|num_expert)": EXPERTS,
        r".*(experts_per_tok(en)?|moe_topk|moe_top_k|topk_experts|top_k_experts|moe_k|index_topk)": 2,
        r".*(num|n|attention|mamba_n)_heads?(_per_layer)?|.*num_key_value_heads|.*num_kv_heads": HEADS,
        r".*(head_dim|head_size|d_head|dim_head|d_kv|headdim|rotary_dim|kv_channels)": HEAD_DIM,
        r".*(intermediate_size|intermediate_size_mlp|ffn_dim|ffn_hidden_size|feed_forward_size|mlp_dim)": FFN,
        r"d_ff|dff|dim_ff|d_inner|n_inner": FFN,
        r".*(hidden_size|d_model|n_embd|embedding_size|emb_dim|embedding_dim|embed_proj_dim)": HIDDEN,
        r".*(embed_dim|lru_width)": HIDDEN,
        r".*(hidden_size_per_layer_input|output_dim|input_dim|out_dim|in_dim)": HIDDEN,
        r".*(rank|d_state|state_size)": HEADS * HEADS,
        # Groups of experts, and how many of them a token may choose from.
        r"n_group|num_expert_groups?": 2,
        r"topk_group": 1,
    }.items()
)
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
# Numbers of heads that make up so many features each, times an expansion of the hidden size.
_EXPANDED = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("mamba_num_heads", "mamba_head_dim", "expand"),
    ("num_heads", "head_dim", "expand"),
)


def _pretrained_twin(config: PretrainedConfig) -> PretrainedConfig:
    return type(config).from_dict(_shrunk(config.to_dict()))


def _shrunk(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration, and of those inside it, for few layers and small sizes."""
    num_layers = next((given[name] for name in _COUNTS if isinstance(given.get(name), int)), 0)
    small: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, dict):
            # What layers have of their own is listed by their number.
            own = {key: one for key, one in value.items() if not str(key).isdecimal() or int(key) < LAYERS}
            small[name] = _shrunk(own)
        elif isinstance(value, list) and num_layers > LAYERS and len(value) == num_layers:
            small[name] = [_smaller(name, one) for one in value[:LAYERS]]
        elif str(name).endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY:
            # Tokens with a meaning of their own are among the few that are left.
            small[name] = value % VOCABULARY
        else:
            small[name] = _smaller(name, value)
    for groups, heads in (("num_key_value_heads", "num_attention_heads"), ("num_kv_heads", "num_attention_heads")):
        if isinstance(given.get(groups), int) and isinstance(given.get(heads), int):
            small[groups] = HEADS if given[groups] == given[heads] else max(1, HEADS // 2)
    for heads, size, expand in _EXPANDED:
        if all(isinstance(given.get(name), int) for name in (heads, size, expand)):
            small[heads] = given[expand] * HIDDEN // small[size]
    if isinstance(given.get("qk_head_dim"), int):
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    return small


def _smaller(name: str, value: Any) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    return next((min(value, most) for pattern, most in _PRETRAINED if pattern.fullmatch(str(name))), value)


def clipped(batch: Any) -> Any:
    """A batch with short rows of few tokens. A dim as long as a row of integers is a sequence."""
    lengths: set[int] = set()

    def look(tensor: Tensor) -> Tensor:
        if tensor.dim() == 2 and _is_integer(tensor):
            lengths.add(tensor.shape[1])
        return tensor

    def cut(tensor: Tensor) -> Tensor:
        for dim in range(1, tensor.dim()):
            if tensor.shape[dim] in lengths and tensor.shape[dim] > SEQUENCE:
                tensor = tensor.narrow(dim, 0, SEQUENCE)
        if tensor.dim() == 2 and _is_integer(tensor):
            tensor = tensor.where(tensor < VOCABULARY, tensor % VOCABULARY)
        return tensor.contiguous()

    map_tensors(batch, look)
    return map_tensors(batch, cut)


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.element_size() > 1
