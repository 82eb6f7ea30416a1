"""LLaVA 1.5: `LlavaForConditionalGeneration` of a CLIP vision tower and a Llama.

Files differ in two ways, which their own names show: whether everything is under `model.` (as modules of
transformers 5 are named) or the language model alone (as it writes files), and whether the tower's names have
`vision_model.` in them (as transformers 4 wrote them).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_megatron.hf import gated_decoder, llama
from lightning_megatron.hf.blocks import Shape, TensorBlock, query_key_value
from lightning_megatron.hf.config_reader import (
    HARMLESS,
    HEADS,
    TRAINING_ONLY,
    ConfigReader,
    differences,
    fields_to_hf,
    head_faults,
    unwritten_faults,
)
from lightning_megatron.hf.family import Family, ParamMapping
from lightning_megatron.models.gpt import GPTConfig
from lightning_megatron.models.llava import LlavaConfig
from lightning_megatron.models.vision import VisionConfig
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.linears import DOWN, PROJECTION, QKV, UP

DEFAULTS = {
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -2,
    "multimodal_projector_bias": True,
    "tie_word_embeddings": False,
}
CLIP_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
}
# Of a config.json without a vision_config.
TOWER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}

# Its initial values, the projection of CLIP's own head, and its vocabulary.
_CLIP_HARMLESS = HARMLESS | {"initializer_factor", "projection_dim", "vocab_size", "dropout"}

ACTIVATIONS = {
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_CLIP_CHOICES = {"activation": ACTIVATIONS}
_CLIP_NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "num_channels": "num_channels",
    "image_size": "image_size",
    "patch_size": "patch_size",
    "activation": "hidden_act",
    "norm_epsilon": "layer_norm_eps",
    "attention_dropout": "attention_dropout",
    "init_std": "initializer_range",
}
_STRATEGIES = {"default": "default", "full": "full"}
# Placeholder for a tower whose configuration has errors, so that all errors are listed together.
_NO_TOWER = VisionConfig(num_layers=24, hidden_size=1, num_attention_heads=1, image_size=1, patch_size=1)
_KINDS = ("weight", "bias")


def vision_query_key_value(config: TransformerConfig, shape: Shape) -> tuple[TensorBlock, ...]:
    """Layout as of `query_key_value`, for the heads of the vision tower."""
    assert isinstance(config, LlavaConfig)
    return query_key_value(config.vision, shape)


def rows(*, is_inner: bool, has_vision_model: bool) -> tuple[ParamMapping, ...]:
    """Mappings of files with everything under `model.`, and of those with `vision_model.` in the names of the tower."""
    outer = "model." if is_inner else ""
    tower = f"{outer}vision_tower.{'vision_model.' if has_vision_model else ''}"
    return (*_vision_rows(tower), *_projector_rows(outer), *_language_rows(is_inner))


def _vision_rows(tower: str) -> tuple[ParamMapping, ...]:
    layer = f"{tower}encoder.layers.{{}}"
    return (
        ParamMapping("vision.embedding.patches", (f"{tower}embeddings.patch_embedding.weight",)),
        ParamMapping("vision.embedding.class_token", (f"{tower}embeddings.class_embedding",)),
        ParamMapping("vision.embedding.positions.weight", (f"{tower}embeddings.position_embedding.weight",)),
        *(
            row
            for kind in _KINDS
            for row in (
                # Their spelling.
                ParamMapping(f"vision.embedding.norm.{kind}", (f"{tower}pre_layrnorm.{kind}",)),
                ParamMapping(
                    f"vision.layers.{{}}.{QKV}.{kind}",
                    tuple(f"{layer}.self_attn.{part}_proj.{kind}" for part in "qkv"),
                    vision_query_key_value,
                ),
                ParamMapping(f"vision.layers.{{}}.{PROJECTION}.{kind}", (f"{layer}.self_attn.out_proj.{kind}",)),
                ParamMapping(f"vision.layers.{{}}.attention_norm.{kind}", (f"{layer}.layer_norm1.{kind}",)),
                ParamMapping(f"vision.layers.{{}}.mlp_norm.{kind}", (f"{layer}.layer_norm2.{kind}",)),
                ParamMapping(f"vision.layers.{{}}.{UP}.{kind}", (f"{layer}.mlp.fc1.{kind}",)),
                ParamMapping(f"vision.layers.{{}}.{DOWN}.{kind}", (f"{layer}.mlp.fc2.{kind}",)),
                ParamMapping(f"vision.final_norm.{kind}", (f"{tower}post_layernorm.{kind}",)),
            )
        ),
    )


def _projector_rows(outer: str) -> tuple[ParamMapping, ...]:
    return tuple(
        ParamMapping(f"projector.{ours}.{kind}", (f"{outer}multi_modal_projector.{theirs}.{kind}",))
        for ours, theirs in (("up", "linear_1"), ("down", "linear_2"))
        for kind in _KINDS
    )


def _language_rows(is_inner: bool) -> tuple[ParamMapping, ...]:
    return tuple(
        ParamMapping(row.ours, tuple(_language_name(name, is_inner) for name in row.theirs), row.layout)
        for row in gated_decoder.ROWS
    )


def _language_name(name: str, is_inner: bool) -> str:
    """Name of a Llama's tensor within a LLaVA."""
    if not is_inner:
        return f"language_model.{name}"
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


@dataclass(frozen=True, kw_only=True)
class LlavaFamily(Family):
    """LLaVA: its rows follow from the names in the file."""

    def rows_of(self, names: Iterable[str]) -> tuple[ParamMapping, ...]:
        found = list(names)
        if not found:
            return self.rows
        return rows(
            is_inner=any(name.startswith("model.multi_modal_projector.") for name in found),
            has_vision_model=any("vision_tower.vision_model." in name for name in found),
        )


def config_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of a LlavaConfig from a config.json."""
    text = _nested(reader, "text_config", "llama", llama.DEFAULTS)
    language = llama.config_from_hf(text)
    text.note_unknown("llama", llama.FAMILY.harmless)
    reader.faults += [f"text_config: {fault}" for fault in text.faults]
    strategy = reader.choose("vision_feature_select_strategy", _STRATEGIES)
    layer = reader.raw.get("vision_feature_layer")
    if isinstance(layer, (list, tuple)):
        reader.faults.append(
            f"vision_feature_layer ({list(layer)}) must be one layer: features of several, joined, are not built"
        )
        reader.raw["vision_feature_layer"] = -2
    return {
        **language,
        "tie_embeddings": reader.take("tie_word_embeddings") or language["tie_embeddings"],
        "vision": vision_config(reader),
        "image_token": reader.take("image_token_index"),
        "feature_layer": reader.take("vision_feature_layer"),
        "keeps_class_token": strategy == "full",
        "projector_activation": reader.choose("projector_hidden_act", ACTIVATIONS),
        "projector_bias": reader.take("multimodal_projector_bias"),
    }


def vision_config(reader: ConfigReader) -> VisionConfig:
    """The tower of the field `vision_config`; LLaVA's where it is left out. Faults are noted in the reader."""
    if reader.raw.get("vision_config") is None:
        reader.raw["vision_config"] = TOWER
    clip = _nested(reader, "vision_config", "clip_vision_model", CLIP_DEFAULTS)
    fields = vision_fields(clip)
    clip.note_unknown("clip_vision_model", _CLIP_HARMLESS)
    faults, tower = clip.faults, _NO_TOWER
    if not faults:
        try:
            tower = VisionConfig(**fields)
        except ValueError as error:
            faults = str(error).splitlines()
    reader.faults += [f"vision_config: {fault}" for fault in faults]
    return tower


def vision_fields(clip: ConfigReader) -> dict[str, Any]:
    """Fields of a VisionConfig from a config.json."""
    return clip.take_all(_CLIP_NAMES, _CLIP_CHOICES)


def _nested(reader: ConfigReader, key: str, model_type: str, defaults: Mapping[str, Any]) -> ConfigReader:
    """A configuration within theirs, of a model of that type."""
    raw = reader.take(key, {})
    if not isinstance(raw, Mapping):
        reader.faults.append(f"{key} ({raw!r}) must be a table of fields")
        raw = {}
    nested = ConfigReader(raw, defaults)
    nested.require("model_type", model_type)
    return nested


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Fields of a config.json from a LlavaConfig."""
    assert isinstance(config, LlavaConfig)
    return {
        "text_config": {"model_type": "llama", **llama.config_to_hf(config)},
        "vision_config": {"model_type": "clip_vision_model", **_vision_to_hf(config.vision)},
        "image_token_index": config.image_token,
        "image_seq_length": config.features_per_image,
        **fields_to_hf(config, {"projector_activation": "projector_hidden_act"}, {"projector_activation": ACTIVATIONS}),
        "vision_feature_select_strategy": "full" if config.keeps_class_token else "default",
        "vision_feature_layer": config.feature_layer,
        "multimodal_projector_bias": config.projector_bias,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _vision_to_hf(config: VisionConfig) -> dict[str, Any]:
    # The last is of a head that a LLaVA has not.
    return {**fields_to_hf(config, _CLIP_NAMES, _CLIP_CHOICES), "projection_dim": config.hidden_size}


def rules(config: GPTConfig) -> list[str]:
    """Rules of this family that a configuration breaks, one sentence each."""
    assert isinstance(config, LlavaConfig)
    vision = config.vision
    translated = vision_fields(ConfigReader({}, CLIP_DEFAULTS))
    of_tower = head_faults(vision) + differences(vision, hidden_dropout=0.0)
    of_tower += unwritten_faults(vision, {*translated, *HEADS, *TRAINING_ONLY, "max_sequence_length"})
    if vision.activation not in ACTIVATIONS.values():
        of_tower.append(f"activation ({vision.activation!r}) must be one of {', '.join(set(ACTIVATIONS.values()))}")
    found = llama.rules(config) + [f"vision: {fault}" for fault in of_tower]
    if not 0 <= config.image_token < config.vocab_size:
        found.append(
            f"image_token ({config.image_token}) must be in the vocabulary, from 0 to {config.vocab_size - 1}, because "
            "transformers embeds it"
        )
    return found


FAMILY = LlavaFamily(
    name="llava",
    architecture="LlavaForConditionalGeneration",
    prefix="",
    rows=rows(is_inner=False, has_vision_model=True),
    ignored=(
        *(f"{o}vision_tower.{v}embeddings.position_ids" for o in ("", "model.") for v in ("", "vision_model.")),
        *(_language_name(name, is_inner) for name in gated_decoder.IGNORED for is_inner in (False, True)),
    ),
    tied={
        _language_name(theirs, is_inner): _language_name(ours, is_inner)
        for theirs, ours in gated_decoder.TIED.items()
        for is_inner in (False, True)
    },
    defaults=DEFAULTS,
    # A processor's number of image tokens, its index of ignored targets, and an older position of a field.
    harmless=HARMLESS | {"image_seq_length", "ignore_index", "vocab_size"},
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=rules,
    ruled=llama.FAMILY.ruled,
    config_class=LlavaConfig,
)
