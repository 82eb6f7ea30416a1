"""A `config.json` of a Hugging Face model, translated to our configuration: fields are read, errors collected.

No field is dropped in silence, either way: one that no family reads must be harmless or at its default when a file is
read (`ConfigReader.note_unknown`), and one of ours that a family does not write must be at its default
(`unwritten_faults`).
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields
from functools import cache
from types import MappingProxyType
from typing import Any

from lightning_megatron.rules.limits import MOST, MOST_LAYERS, limit_faults
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.rotary import RopeScaling, yarn_amplitude

# Names, dtypes and what a forward returns; settings of training, tokenizers, generation and other programs.
_HARMLESS_NAMES = """
_attn_implementation _commit_hash _flash_attn_2_enabled _name_or_path _num_labels architectures attn_implementation
auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward cls_token_id
decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
id2label is_encoder_decoder is_llama_config label2id length_penalty mask_token_id max_length max_new_tokens
max_sequence_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_labels
num_return_sequences output_attentions output_hidden_states output_past output_scores pad_token_id prefix
problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16
use_cache
"""
HARMLESS = frozenset(_HARMLESS_NAMES.split())
"""Fields of any family that change no number of a forward."""

# Fields of any family, with the value that changes nothing.
_NEUTRAL: Mapping[str, Any] = {
    "add_cross_attention": False,
    "is_decoder": False,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_mrope": False,
}

TRAINING_ONLY = frozenset(
    (
        "attention_dropout",
        "embedding_std",
        "hidden_dropout",
        "init_std",
        "label_smoothing",
        "mtp_loss_weight",
        "num_mtp_layers",
        "vocab_multiple",
    )
)
"""Fields of ours that change no number of a forward in evaluation: a family need not write them."""

MISSING = object()
NOTHING: Mapping[str, Any] = MappingProxyType({})


@cache
def transformers_defaults(model_type: str) -> Mapping[str, Any]:
    """Fields of the configuration class that transformers has for a model_type; none where it is not installed."""
    try:
        from transformers import AutoConfig
    except ImportError:
        return {}
    defaults: Mapping[str, Any] = AutoConfig.for_model(model_type).to_dict()
    return defaults


class ConfigReader:
    """The fields of a `config.json` over the defaults of its family; `faults` lists all errors."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.raw = {**defaults, **raw}
        self._defaults = defaults
        self.faults: list[str] = []
        self.taken: set[str] = {"quantization_config"}
        if self.raw.get("quantization_config") is not None:
            self.faults.append(
                "quantization_config is set, and quantized weights are not read; save the model without quantization "
                "(dequantize()) and give that"
            )

    def take(self, key: str, default: Any = MISSING) -> Any:
        """The field, or the default where it is null or not there; with neither it is a fault."""
        self.taken.add(key)
        if self.raw.get(key) is None and default is MISSING:
            self.faults.append(f"{key} is not there, and the model cannot be built without it; add it")
            return 0
        value, usual = self.raw.get(key), self._defaults.get(key)
        if usual is None and default is not MISSING:
            usual = default
        if value is not None and usual is not None and not _is_like(value, usual):
            self.faults.append(f"{key} ({value!r}) must be of the kind of {usual!r}")
            return usual
        if isinstance(value, float) and not math.isfinite(value):
            self.faults.append(f"{key} ({value!r}) must be a finite number")
            return default if usual is None else usual
        if isinstance(value, int) and abs(value) > (most := MOST_LAYERS if "layer" in key else MOST):
            # Before anything is counted up to it.
            self.faults += limit_faults({key: abs(value)}, most)
            return default if usual is None else usual
        return default if value is None else value

    def take_list(self, key: str, kind: type) -> list[Any]:
        """The field, a list of values of that type; empty where it is null or not there."""
        value = self.take(key, [])
        if isinstance(value, list) and all(type(one) is kind for one in value):
            return value
        self.faults.append(f"{key} ({value!r}) must be a list of {kind.__name__}")
        return []

    def choose(self, key: str, choices: Mapping[str, str]) -> str:
        """Value of ours for the field's text."""
        value = self.take(key)
        if value not in choices:
            self.faults.append(
                f"{key} ({value!r}) must be one of {', '.join(map(repr, choices))}: others are not built"
            )
            return next(iter(choices.values()))
        return choices[value]

    def take_all(
        self,
        names: Mapping[str, str],
        choices: Mapping[str, Mapping[str, str]] = NOTHING,
        optional: Mapping[str, Any] = NOTHING,
    ) -> dict[str, Any]:
        """Fields of ours by `names`, ours to theirs; `choices` are our values for their texts, `optional` those of ours
        that they may leave out, with the value then."""
        return {
            ours: self.choose(theirs, choices[ours])
            if ours in choices
            else self.take(theirs, optional.get(ours, MISSING))
            for ours, theirs in names.items()
        }

    def require(self, key: str, *supported: Any) -> None:
        """Notes a fault unless the field is absent or one of the values that change nothing."""
        self.taken.add(key)
        value = self.raw.get(key)
        if value is not None and value not in supported:
            may_be = " or ".join(map(repr, supported))
            self.faults.append(f"{key} ({value!r}) must be {may_be}: anything else is not built")

    def take_alias(self, alias: str, name: str) -> None:
        """Takes a field that is written under another name."""
        self.taken.add(alias)
        if self.raw.get(alias) is not None:
            self.raw[name] = self.raw[alias]

    def note_layer_types(self, kinds: list[str], num_layers: int) -> None:
        """Notes a fault unless each layer has one of the two kinds of attention."""
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown or len(kinds) != num_layers:
            self.faults.append(
                f"layer_types (length {len(kinds)}, kinds {', '.join(sorted(set(kinds)))}) must name one of "
                f"'full_attention' and 'sliding_attention' for each of {num_layers} layers"
            )

    def hidden_dropout(self) -> float:
        """Our hidden_dropout, which files give twice: of the embedding, and of each half of a layer."""
        of_halves, of_embedding = self.take("resid_pdrop", 0.0), self.take("embd_pdrop", 0.0)
        if of_halves != of_embedding:
            self.faults.append(
                f"resid_pdrop ({of_halves}) and embd_pdrop ({of_embedding}) must be equal: there is one "
                "hidden_dropout; set them alike"
            )
        return float(of_halves)

    def note_unknown(self, model_type: str, harmless: Collection[str]) -> None:
        """Notes a fault for each field that was not taken, unless it is harmless or at its default.

        Called last. The default is that of transformers' configuration class, which is imported only where needed.
        """
        known = {*self.taken, *harmless}
        unknown = {
            key: value
            for key, value in self.raw.items()
            if key not in known and value is not None and _NEUTRAL.get(key, MISSING) != value
        }
        usual = transformers_defaults(model_type) if unknown else {}
        self.faults += [
            f"{key} ({value!r}) is a field that {model_type!r} is not known to have, and what it changes is not built; "
            + (f"set it to {usual[key]!r}" if key in usual else "take it out if it changes nothing that a model gives")
            for key, value in unknown.items()
            if key not in usual or usual[key] != value
        ]

    def rope(self, *, is_partial: bool = False) -> dict[str, Any]:
        """Rotary fields of ours, from either spelling: `rope_parameters`, or `rope_theta` and `rope_scaling`.

        `is_partial`: the family's models may rotate a part of each head.
        """
        self.taken |= {"rope_parameters", "rope_theta", "rope_scaling"}
        given = [self.raw.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
        if not all(isinstance(settings, Mapping) for settings in given):
            self.faults.append("rope_parameters and rope_scaling must be tables of settings")
            given = []
        # Where both are there, transformers takes the older spelling.
        settings = {key: value for settings in given for key, value in settings.items()}
        base = settings.pop("rope_theta", None) or self.raw.get("rope_theta") or 10000.0
        if not _is_like(base, 10000.0) or not 0 < base < math.inf:
            self.faults.append(f"rope_theta ({base!r}) must be a number above 0")
            base = 10000.0
        old_kind, kind = settings.pop("type", None), settings.pop("rope_type", None)
        kind = kind or old_kind or "default"
        share = self.take("partial_rotary_factor", 1.0)
        share = settings.pop("partial_rotary_factor", None) or share
        if not is_partial and share not in (1, 1.0):
            self.faults.append(f"partial_rotary_factor ({share}) must be 1: the family's models rotate whole heads")
        scaling = None if kind == "default" else self._scaling(str(kind), settings)
        fields = {"position": "rotary", "rotary_base": float(base), "rope_scaling": scaling}
        return {**fields, "rotary_fraction": float(share)} if is_partial else fields

    def rope_setting(self, name: str) -> float:
        """A number among the rotary settings that `rope` does not take over; 0 where it is not there."""
        given = [self.raw.get(key) for key in ("rope_scaling", "rope_parameters")]
        return float(next((one[name] for one in given if isinstance(one, Mapping) and one.get(name)), 0.0))

    def _scaling(self, kind: str, settings: dict[str, Any]) -> RopeScaling | None:
        names = {"linear": _LINEAR, "llama3": _LLAMA3, "yarn": _YARN}.get(kind)
        if names is None:
            self.faults.append(
                f"rope_type ({kind!r}) must be one of 'default', 'linear', 'llama3', 'yarn': others are not built"
            )
            return None
        longest = self.raw.get("max_position_embeddings")
        given = {key: value for key, value in settings.items() if value is not None}
        if "original_max_position_embeddings" in names:
            given.setdefault("original_max_position_embeddings", longest)
        else:
            # transformers writes it under every kind, and reads it under some.
            given.pop("original_max_position_embeddings", None)
        numbers = {*names, "mscale", "mscale_all_dim"} - {"truncate"}
        if words := [key for key, value in given.items() if key in numbers and not _is_like(value, 1.0)]:
            self.faults += [f"rope setting {key} ({given[key]!r}) must be a number" for key in words]
            return None
        if kind == "yarn":
            self._mscale(given)
        unknown = sorted(given.keys() - names.keys())
        if unknown:
            self.faults.append(f"rope settings {', '.join(unknown)} are not known under rope_type {kind!r}")
        if "factor" not in given:
            self.faults.append(f"rope settings of rope_type {kind!r} need a factor")
            return None
        ours = {names[key]: value for key, value in given.items() if key in names}
        try:
            return RopeScaling(kind=kind, **ours)  # type: ignore[arg-type]
        except ValueError as error:
            self.faults += str(error).splitlines()
            return None

    def _mscale(self, given: dict[str, Any]) -> None:
        """Yarn's amplitude where two coefficients give it."""
        mscale, of_all = given.pop("mscale", None), given.pop("mscale_all_dim", None)
        factor = given.get("factor")
        if mscale and of_all and factor and "attention_factor" not in given:
            given["attention_factor"] = yarn_amplitude(factor, mscale) / yarn_amplitude(factor, of_all)


def _is_like(value: Any, usual: Any) -> bool:
    """Whether a field is of the type of its family's default."""
    if isinstance(value, bool) or isinstance(usual, bool):
        return isinstance(value, bool) and isinstance(usual, bool)
    if isinstance(usual, float):
        return isinstance(value, (int, float))
    return isinstance(value, type(usual)) or not isinstance(usual, (int, str))


_LINEAR = {"factor": "factor"}
_LLAMA3 = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_sequence_length",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_sequence_length",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
}


def rope_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, the spelling that every version of transformers reads."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_theta": config.rotary_base, "rope_scaling": None}
    names = {"linear": _LINEAR, "llama3": _LLAMA3, "yarn": _YARN}[scaling.kind]
    settings = {theirs: getattr(scaling, ours) for theirs, ours in names.items()}
    if settings.get("truncate"):
        # Older versions of transformers do not know it.
        del settings["truncate"]
    return {"rope_theta": config.rotary_base, "rope_scaling": {"rope_type": scaling.kind, **settings}}


def rope_faults(scaling: RopeScaling, own: Collection[str] = ()) -> list[str]:
    """One sentence for each field of a scaling that would be lost; `own` are those that a family writes itself."""
    return unwritten_faults(scaling, {"kind", *own, *_LINEAR.values(), *_LLAMA3.values(), *_YARN.values()})


def fields_to_hf(
    config: Any, names: Mapping[str, str], choices: Mapping[str, Mapping[str, str]] = NOTHING
) -> dict[str, Any]:
    """Fields of theirs by `names`, ours to theirs, as `ConfigReader.take_all` reads them."""
    values = {ours: getattr(config, ours) for ours in names}
    for ours, texts in choices.items():
        values[ours] = next(text for text, value in texts.items() if value == values[ours])
    return {theirs: values[ours] for ours, theirs in names.items()}


def dense_faults(config: TransformerConfig) -> list[str]:
    """One sentence where some layers have experts."""
    if config.moe is None:
        return []
    return [f"moe ({config.moe.router.num_experts} experts) must be None"]


def unwritten_faults(config: Any, written: Collection[str]) -> list[str]:
    """One sentence for each field of a configuration that is off its default and that a family does not write."""
    return [
        f"{field.name} ({value!r}) must be {usual!r}, because the family's config.json has no field for it"
        for field in fields(config)
        if field.name not in written and (value := getattr(config, field.name)) != (usual := _default_of(field))
    ]


def _default_of(field: Field[Any]) -> Any:
    return field.default if field.default_factory is NO_DEFAULT else field.default_factory()


def differences(config: TransformerConfig, **needed: Any) -> list[str]:
    """One sentence for each field of ours that is not what a family's models have."""
    return [
        f"{name} ({getattr(config, name)!r}) must be {value!r}"
        for name, value in needed.items()
        if getattr(config, name) != value
    ]


HEADS = frozenset(("num_query_groups", "head_dim"))
"""Fields that `head_faults` looks at."""


def head_faults(config: TransformerConfig) -> list[str]:
    """One sentence for each way in which heads are not one of keys for each of queries that share hidden_size."""
    faults = differences(config, num_query_groups=config.num_attention_heads)
    if config.num_attention_heads * config.head_dim != config.hidden_size:
        faults.append(
            f"head_dim ({config.head_dim}) must be hidden_size / num_attention_heads "
            f"({config.hidden_size} / {config.num_attention_heads})"
        )
    return faults
