"""The small twin of a configuration: the same architecture with few layers and small sizes.

A model that is built in `configure_model` from a configuration among the module's attributes or hyper-parameters is
small then: that of this package's models, or of Hugging Face's.
"""

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


_PRETRAINED: dict[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "moe_intermediate_size"), FFN),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), HEADS),
    **dict.fromkeys(("head_dim", "d_kv"), HEAD_DIM),
    **dict.fromkeys(("num_local_experts", "num_experts"), EXPERTS),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), SEQUENCE),
    "num_experts_per_tok": 2,
    "vocab_size": VOCABULARY,
}


def _pretrained_twin(config: PretrainedConfig) -> PretrainedConfig:
    given = config.to_dict()
    small = {name: min(given[name], most) for name, most in _PRETRAINED.items() if isinstance(given.get(name), int)}
    groups = given.get("num_key_value_heads")
    if isinstance(groups, int):
        small["num_key_value_heads"] = HEADS if groups == given.get("num_attention_heads") else max(1, HEADS // 2)
    for name, value in given.items():
        # Tokens with a meaning of their own are among the few that are left.
        if name.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY:
            small[name] = value % VOCABULARY
    if isinstance(given.get("layer_types"), list):
        given["layer_types"] = given["layer_types"][:LAYERS]
    return type(config).from_dict({**given, **small})


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
