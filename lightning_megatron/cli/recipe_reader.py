"""A recipe's YAML file read by the recipe's own parser, without a Trainer: for commands that plan runs and start none.

Options, defaults and errors are those of `fit`. The classes are those of the recipes in `recipes/`.
"""

from argparse import ArgumentError
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lightning_megatron.cli.bounded_yaml import BOUNDED_YAML
from lightning_megatron.cli.option_errors import STRATEGY, about_option, error_lines, settings_of
from lightning_megatron.lightning_modules import (
    BertDataModule,
    BertModule,
    CausalModule,
    ChatDataModule,
    DistillModule,
    DpoModule,
    GPTDataModule,
    GPTModule,
    LlavaDataModule,
    LlavaModule,
    PreferenceDataModule,
    T5ChatDataModule,
    T5DataModule,
    T5FinetuneModule,
    T5Module,
)
from lightning_megatron.lightning_modules.data_module import config_of
from lightning_megatron.lightning_modules.export import ExportPretrained
from lightning_megatron.lightning_modules.finetune import finetune_module
from lightning_megatron.lightning_modules.preference_data import WriteReferences
from lightning_megatron.lightning_modules.print_text import PrintText
from lightning_megatron.lightning_modules.text_data import TextDataModule
from lightning_megatron.models import LlavaConfig
from lightning_megatron.planner.model_parts import Model, SequenceLengths
from lightning_megatron.trainer import MegatronStrategy
from lightning_megatron.trainer.callbacks import ThroughputMonitor


class Recipe(NamedTuple):
    """The classes of a recipe and the options that it takes from others, as its script passes them to `run_recipe`."""

    module: Callable[..., L.LightningModule]
    data: type[TextDataModule]
    links: Mapping[str, str]
    callbacks: Mapping[str, type[L.Callback]]
    made_links: Mapping[str, str] = {}


_VOCABULARY = {"model.config.vocab_size": "data.vocab_size"}
_IMAGES = {
    "model.config.image_token": "data.image_token",
    "model.config.keeps_class_token": "data.keeps_class_token",
    "model.config.vision.image_size": "data.image_size",
    "model.config.vision.patch_size": "data.patch_size",
}
_SENTENCES = {"model.config.add_binary_head": "data.sentence_order"}
_TOKENIZER = {"model.path": "data.tokenizer"}
_CALLBACKS = {"throughput": ThroughputMonitor, "print_text": PrintText}
_EXPORTS = {**_CALLBACKS, "export": ExportPretrained}
_LLAVA = Recipe(LlavaModule, LlavaDataModule, _VOCABULARY | _IMAGES, _CALLBACKS)

PRETRAINING: Mapping[str, Recipe] = {
    "gpt": Recipe(GPTModule, GPTDataModule, _VOCABULARY, _CALLBACKS),
    "bert": Recipe(BertModule, BertDataModule, _VOCABULARY | _SENTENCES, _CALLBACKS),
    "t5": Recipe(T5Module, T5DataModule, _VOCABULARY, _CALLBACKS),
    "llava": _LLAVA,
}
"""The recipe of each kind of model, by the names of `--model-kind`."""

FINETUNING: Mapping[str, Recipe] = {
    "gpt": Recipe(finetune_module, ChatDataModule, _TOKENIZER, _EXPORTS),
    "t5": Recipe(T5FinetuneModule, T5ChatDataModule, _TOKENIZER, _EXPORTS),
    "llava": _LLAVA,
}
"""The recipes that start from a folder with a Hugging Face model."""

CAUSAL = Recipe(
    CausalModule,
    GPTDataModule,
    _TOKENIZER,
    {"export": ExportPretrained},
    {"model.vocab_size": "data.vocab_size"},
)
"""The recipe of any causal model of transformers, as it is."""

_SCORES = {"throughput": ThroughputMonitor, "references": WriteReferences, "export": ExportPretrained}
GUIDED: Mapping[str, Recipe] = {
    "dpo_hf.py": Recipe(DpoModule, PreferenceDataModule, _TOKENIZER, _SCORES),
    "distill_hf.py": Recipe(DistillModule, ChatDataModule, _TOKENIZER, _EXPORTS),
}
"""The recipes that train a model beside a frozen one, by their scripts."""

_SECTIONS = ("trainer", "model", "data", *_EXPORTS)
# Options of `fit` and the like outside these sections.
_SUBCOMMAND_OPTIONS = ("seed_everything", "ckpt_path", "weights_only", "verbose", "return_predictions")
# Packages whose classes a command finds; others may be next to the user's script.
_FOUND_PACKAGES = ("lightning", "lightning_megatron")


def data_config(data: type[TextDataModule]) -> type:
    """The configuration of a recipe's data module, whose fields are the options of the section `data`."""
    config = config_of(data)
    assert config is not None, "data modules of recipes take a configuration"
    return config


def read_recipe(data: Mapping[str, Any], recipe: Recipe) -> Namespace:
    """Every option of the sections `trainer`, `model`, `data` and of callbacks, checked, with defaults filled in.

    A section with a `class_path` belongs to the user's own class: its options are left to its author. Raises ValueError
    with the errors that `fit` finds in the file.
    """
    sections = {}
    for name, section in data.items():
        # A section that resembles none of these is the user's own.
        if section is not None and get_close_matches(str(name), _SECTIONS, n=1):
            if name in _SECTIONS and not isinstance(section, Mapping):
                raise ValueError(f"{name} ({section!r}) must be a table of options")
            sections[name] = _without_user_classes(section)
    own = tuple(name for name in ("model", "data") if "class_path" in sections.get(name, ()))
    for name in own:
        del sections[name]
    parser, names = _parser(recipe.module.__name__, own)
    try:
        config: Namespace = parser.parse_object(sections)
        return config
    except ArgumentError as error:
        raise ValueError(about_option(str(error), names)) from error


def made_settings(annotation: Any, settings: Any, where: str, errors: list[str]) -> Any:
    """The dataclass of parsed settings; None, with its errors added to the list, where its values are invalid."""
    try:
        return settings_of(annotation, settings)
    except ValueError as error:
        errors += [f"{where}: {line}" for line in error_lines(str(error))]
        return None


def sample_errors(
    recipe: Recipe, data: Namespace, model: Model | None, lengths: SequenceLengths, batch: int
) -> list[str]:
    """Errors of the recipe's data module about samples of these lengths, before any text is read."""
    parser, known = LightningArgumentParser(exit_on_error=False), signature(data_config(recipe.data)).parameters
    parser.add_class_arguments(data_config(recipe.data), "data")
    chosen: dict[str, Any] = {
        # Whatever the model has, where its tokenizer alone says it.
        "vocab_size": 1 if model is None else model.vocab_size,
        "tokenizer": "",
        "sequence_length": lengths.sequence,
        "decoder_sequence_length": lengths.decoder_sequence,
        "global_batch_size": batch,
    }
    if isinstance(model, LlavaConfig):
        chosen |= {"image_token": model.image_token, "keeps_class_token": model.keeps_class_token}
        chosen |= {"image_size": model.vision.image_size, "patch_size": model.vision.patch_size}
    own = Namespace(data=data.clone())
    for name in chosen:
        if name in known:
            own.data[name] = chosen[name]
    errors: list[str] = recipe.data(parser.instantiate(own).data).sample_faults()
    return errors


@cache
def _parser(module: str, own: tuple[str, ...]) -> tuple[LightningArgumentParser, list[str]]:
    """A parser of the sections of the recipe with that module but for the user's own, and the names of all options."""
    recipe = next(one for one in (*PRETRAINING.values(), *FINETUNING.values(), CAUSAL) if one.module.__name__ == module)
    parser = LightningArgumentParser(exit_on_error=False, parser_mode=BOUNDED_YAML)
    owners: dict[str, Any] = {"trainer": L.Trainer, "model": recipe.module, **recipe.callbacks}
    for name, owner in owners.items():
        if name not in own:
            parser.add_lightning_class_args(owner, name)
    if "data" not in own:
        parser.add_class_arguments(data_config(recipe.data), "data", sub_configs=True)
    for source, target in recipe.links.items() if not own else ():
        parser.link_arguments(source, target)
    for source, target in recipe.made_links.items() if not own else ():
        parser.link_arguments(source, target, apply_on="instantiate")
    strategy = [f"{STRATEGY}.{name}" for name in signature(MegatronStrategy).parameters]
    return parser, [*strategy, *parser.get_defaults(skip_validation=True).keys()]


def _without_user_classes(section: Any) -> Any:
    """A section without objects of classes that a command does not find."""
    if not isinstance(section, Mapping):
        return section
    cleaned = {}
    for name, value in section.items():
        if isinstance(value, list):
            value = [one for one in value if not _is_users_class(one)]
        cleaned[name] = None if _is_users_class(value) else value
    return cleaned


def _is_users_class(value: Any) -> bool:
    path = value.get("class_path") if isinstance(value, Mapping) else None
    return isinstance(path, str) and "." in path and path.partition(".")[0] not in _FOUND_PACKAGES
