"""Every family that is known, and which of them a model is."""

from collections.abc import Mapping
from typing import Any

from lightning_megatron.hf import (
    bert,
    deepseek_v3,
    glm4,
    gpt2,
    gpt_oss,
    llama,
    llava,
    mixtral,
    olmo2,
    phi3,
    qwen2_moe,
    qwen3_moe,
    t5,
)
from lightning_megatron.hf.dense_decoder import MISTRAL, QWEN2, QWEN3
from lightning_megatron.hf.family import Config, Family
from lightning_megatron.hf.gemma import GEMMA2, GEMMA3

_DENSE = (GEMMA2, GEMMA3, glm4.FAMILY, gpt2.FAMILY, llama.FAMILY, MISTRAL, olmo2.FAMILY, phi3.FAMILY, QWEN2, QWEN3)
_WITH_EXPERTS = (deepseek_v3.FAMILY, gpt_oss.FAMILY, mixtral.FAMILY, qwen2_moe.FAMILY, qwen3_moe.FAMILY)
_OTHERS = (bert.FAMILY, llava.FAMILY, t5.FAMILY)
FAMILIES: dict[str, Family] = {
    family.name: family for family in sorted(_DENSE + _WITH_EXPERTS + _OTHERS, key=lambda family: family.name)
}


def family_of_file(raw: Mapping[str, Any], where: str) -> Family:
    """The family that a `config.json` names. Raises ValueError for one that is not known."""
    known = ", ".join(map(repr, FAMILIES))
    if "model_type" not in raw:
        raise ValueError(f"{where} has no model_type; it must be one of {known}")
    if str(raw["model_type"]) not in FAMILIES:
        raise ValueError(f"model_type ({raw['model_type']!r}) in {where} must be one of {known}: others are not known")
    return FAMILIES[str(raw["model_type"])]


def family_of_config(config: Config, name: str | None) -> Family:
    """The family of that name, or the one that the configuration fits. Raises ValueError where it is not one."""
    if name is not None and name not in FAMILIES:
        raise ValueError(f"family ({name!r}) must be one of {', '.join(map(repr, FAMILIES))}")
    candidates = FAMILIES if name is None else {name: FAMILIES[name]}
    candidates = {known: family for known, family in candidates.items() if family.config_class is type(config)}
    if not candidates:
        raise ValueError(f"family ({name!r}) has no models with a {type(config).__name__}; leave it out")
    faults = {family: FAMILIES[family].faults(config) for family in candidates}
    fits = [family for family, found in faults.items() if not found]
    fits = [family for family in fits if not FAMILIES[family].gives_way] or fits
    if not fits:
        lines = [f"{family}: {'; '.join(found)}" for family, found in faults.items()]
        head = (
            "the model's configuration is none that Hugging Face families have; change what a family asks for, or keep "
            "the model as a checkpoint, which has every field:"
        )
        raise ValueError("\n  ".join([head, *lines]))
    if len(fits) > 1:
        raise ValueError(
            f"the model's configuration fits families {' and '.join(map(repr, fits))}; say which: family={fits[0]!r}"
        )
    return FAMILIES[fits[0]]
