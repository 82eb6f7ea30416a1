"""What a recipe's YAML file gives to the classes that a run makes, against the options that these take.

Read for plans, of the signatures that `fit` reads too; nothing is made. Faults are collected.
"""

import inspect
from argparse import ArgumentError
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, get_args

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser

from lightning_megatron.cli.option_errors import rule_of
from lightning_megatron.cli.plain import value_of
from lightning_megatron.lightning_modules import (
    BertDataModule,
    BertModule,
    ChatDataModule,
    GPTDataModule,
    GPTModule,
    LlavaDataModule,
    LlavaModule,
    T5ChatDataModule,
    T5DataModule,
    T5FinetuneModule,
    T5Module,
)
from lightning_megatron.lightning_modules.export import ExportPretrained
from lightning_megatron.lightning_modules.finetune import FinetuneModule
from lightning_megatron.lightning_modules.print_text import PrintText
from lightning_megatron.lightning_modules.text_data import TextDataModule
from lightning_megatron.models import LlavaConfig
from lightning_megatron.planner.model_parts import Model, SequenceLengths
from lightning_megatron.trainer import MegatronStrategy
from lightning_megatron.trainer.callbacks import ThroughputMonitor

_TRAINED: dict[str, tuple[type, type[TextDataModule]]] = {
    "gpt": (GPTModule, GPTDataModule),
    "bert": (BertModule, BertDataModule),
    "t5": (T5Module, T5DataModule),
    "llava": (LlavaModule, LlavaDataModule),
}
# The module and the data module of each recipe, by the kind of model.
_TUNED: dict[str, tuple[type, type[TextDataModule]]] = {
    "gpt": (FinetuneModule, ChatDataModule),
    "t5": (T5FinetuneModule, T5ChatDataModule),
    "llava": (LlavaModule, LlavaDataModule),
}
# Of recipes that start from a folder.
_CALLBACKS: dict[str, type] = {"throughput": ThroughputMonitor, "print_text": PrintText, "export": ExportPretrained}
_OTHERS = ("seed_everything", "ckpt_path", "weights_only", "verbose", "return_predictions")
# What `fit` and its like take beside them.
_STRATEGY = "lightning_megatron.MegatronStrategy"
_STRATEGY_PATHS = (
    _STRATEGY,
    "MegatronStrategy",
    "lightning_megatron.trainer.MegatronStrategy",
    "lightning_megatron.trainer.strategy.MegatronStrategy",
)
_OURS = ("lightning", "lightning_megatron")


def strategy_of(data: Mapping[str, Any], faults: list[str]) -> Mapping[str, Any] | None:
    """The options of MegatronStrategy; none where the file leaves the strategy to Lightning."""
    value = data.get("strategy", "auto")
    if value == "auto":
        return None
    if value == "megatron":
        return {}
    if not isinstance(value, Mapping) or value.get("class_path") not in _STRATEGY_PATHS:
        given = value.get("class_path") if isinstance(value, Mapping) else value
        faults.append(
            f"trainer.strategy ({given!r}) must be MegatronStrategy to be planned; give class_path: {_STRATEGY}, or "
            "leave the strategy out and write a --layout"
        )
        return None
    if unknown := [name for name in value if name not in ("class_path", "init_args")]:
        faults.append(
            f"trainer.strategy ({', '.join(map(str, unknown))}) must have its options under init_args; move them there"
        )
    arguments = value.get("init_args") or {}
    if not isinstance(arguments, Mapping):
        faults.append(f"trainer.strategy.init_args ({arguments!r}) must be a table of options")
        return {}
    return arguments


def strategy_faults(arguments: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """What MegatronStrategy does not take; options in `read` are read, and told, elsewhere."""
    return _faults(MegatronStrategy, arguments, "trainer.strategy.init_args", read)


def option_faults(
    data: Mapping[str, Any], kind: str, *, is_tuned: bool, read: Mapping[str, Collection[str]]
) -> list[str]:
    """What the Trainer, the module, the data module and the callbacks of the recipe for that kind of model do not take.

    `is_tuned`: the recipe starts from a folder. `read` are the options of a section that are read elsewhere. A class
    that is not of this package is left to its author.
    """
    module, samples = _TUNED.get(kind, _TUNED["gpt"]) if is_tuned else _TRAINED[kind]
    owners: dict[str, type] = {"trainer": L.Trainer, "model": module, "data": samples, **_CALLBACKS}
    sections, faults = (*owners, *_OTHERS), list[str]()
    for name in data:
        nearest = get_close_matches(str(name), sections, n=1)
        if nearest and name not in sections:
            faults.append(f"{name} is no section of a recipe; did you mean {nearest[0]}?")
    for name, owner in owners.items():
        section = {} if data.get(name) is None else data[name]
        if not isinstance(section, Mapping):
            faults.append(f"{name} ({section!r}) must be a table of options")
        elif "class_path" not in section:
            faults += _faults(owner, section, name, read.get(name, ()))
    return faults


def sample_faults(
    options: Mapping[str, Any], model: Model, kind: str, lengths: SequenceLengths, batch: int, *, is_tuned: bool
) -> list[str]:
    """What the data module of that recipe has against its samples, which have no text yet: how short they are.

    `options` are those of the file's data section, without faults.
    """
    if "class_path" in options:
        return []
    owner = (_TUNED if is_tuned else _TRAINED).get(kind, _TUNED["gpt"])[1]
    known = inspect.signature(owner).parameters
    linked: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "tokenizer": "",
        "sequence_length": lengths.sequence,
        "decoder_sequence_length": lengths.decoder_sequence,
        "global_batch_size": batch,
    }
    if isinstance(model, LlavaConfig):
        vision = model.vision
        linked |= {"image_token": model.image_token, "keeps_class_token": model.keeps_class_token}
        linked |= {"image_size": vision.image_size, "patch_size": vision.patch_size}
    given = {name: value_of(known[name].annotation, value, name, []) for name, value in options.items()}
    data = owner(**given | {name: value for name, value in linked.items() if name in known})
    return data.sample_faults()


def _faults(owner: type, section: Mapping[str, Any], where: str, read: Collection[str]) -> list[str]:
    """What the class does not take of the options that the section has."""
    known, faults = inspect.signature(owner).parameters, list[str]()
    for name, value in section.items():
        if name not in known:
            nearest = get_close_matches(str(name), known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "leave it out"
            faults.append(f"{where}.{name} is no option of {owner.__name__}; {hint}")
        elif name in read:
            continue
        elif _has_settings(known[name].annotation):
            value_of(known[name].annotation, value, f"{where}.{name}", faults)
        elif rule := _rule(owner, name, _without_strange(value), set(known)):
            faults.append(f"{where}.{name} ({value!r}) {rule}")
    return faults


def _has_settings(annotation: Any) -> bool:
    return is_dataclass(annotation) or any(map(_has_settings, get_args(annotation)))


def _rule(owner: type, name: str, value: Any, known: set[str]) -> str:
    """What the class takes for that option, where the value is something else."""
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_class_arguments(owner, "of", skip=known - {name})
    try:
        parser.parse_object({"of": {name: value}})
    except ArgumentError as error:
        return rule_of(str(error))
    return ""


def _without_strange(value: Any) -> Any:
    """A value without objects of classes that may lie beside the user's script, where a command does not find them."""
    if isinstance(value, list):
        return [one for one in value if not _is_strange(one)]
    return None if _is_strange(value) else value


def _is_strange(value: Any) -> bool:
    path = value.get("class_path") if isinstance(value, Mapping) else None
    return isinstance(path, str) and "." in path and path.partition(".")[0] not in _OURS
