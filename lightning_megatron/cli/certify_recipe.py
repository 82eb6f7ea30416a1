"""The module and the data of a recipe's YAML file, made by the recipe itself, for a certificate."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningCLI

from lightning_megatron.cli.plan_file import KINDS, is_causal_recipe, model_of_folder
from lightning_megatron.cli.plan_recipe import kind_of, module_section
from lightning_megatron.cli.recipe import RecipeCLI
from lightning_megatron.cli.recipe_reader import CAUSAL, FINETUNING, GUIDED, PRETRAINING, Recipe
from lightning_megatron.cli.shipped_recipes import script_of
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.testing.subject import Subject, SubjectError
from lightning_megatron.text_files import read_table
from lightning_megatron.trainer import ConfigurationError

# Options of `fit` that are no options of the module, the data or the Trainer.
_OF_FIT = ("ckpt_path", "weights_only", "verbose", "return_predictions")
# Options of the Trainer that change the numbers of a step.
_OF_STEPS = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
# The Trainer that the file asks for is never run, and may need machines that are not here.
_HERE: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "num_nodes": 1,
    "strategy": "auto",
    "precision": "32-true",
    "logger": False,
    "callbacks": None,
    "plugins": None,
    "profiler": None,
    "enable_checkpointing": False,
}


@dataclass(frozen=True, kw_only=True)
class FromRecipe:
    """The subject of a recipe's file."""

    path: Path
    trainer: Mapping[str, Any]

    def __call__(self) -> Subject:
        try:
            table = read_table(self.path)
            cli = self._parsed(table)
        except (ValueError, UsageError, MisconfigurationException) as error:
            lines = error.faults if isinstance(error, ConfigurationError) else [str(error)]
            raise SubjectError(f"{self.path}: {'; '.join(lines)}") from error
        asked = table.get("trainer") or {}
        trainer = {name: asked[name] for name in _OF_STEPS if asked.get(name) is not None}
        left_out = ["trainer.callbacks"] if asked.get("callbacks") else []
        return Subject(
            module=cli.model,
            data=cli.datamodule,
            trainer=trainer | dict(self.trainer),
            notes=(f"{', '.join(left_out)} of {self.path.name} did not run",) if left_out else (),
        )

    def _parsed(self, table: dict[str, Any]) -> LightningCLI:
        given = {name: value for name, value in table.items() if name not in _OF_FIT}
        given["trainer"] = {**(table.get("trainer") or {}), **_HERE}
        recipe = _recipe_of(self.path, table)
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
            json.dump(given, file)
            file.flush()
            args = ["--config", file.name]
            if recipe is None:
                return LightningCLI(
                    args=args,
                    run=False,
                    subclass_mode_model=True,
                    subclass_mode_data=True,
                    save_config_callback=None,
                    auto_configure_optimizers=False,
                    parser_kwargs={"exit_on_error": False},
                )
            return RecipeCLI(
                recipe.module,
                recipe.data,
                links=recipe.links,
                made_links=recipe.made_links,
                callbacks=recipe.callbacks,
                args=args,
                run=False,
            )


def _recipe_of(path: Path, table: dict[str, Any]) -> Recipe | None:
    """The recipe whose file it is; None for one of the user's own classes."""
    for name in ("trainer", "model", "data"):
        if not isinstance(table.get(name) or {}, dict):
            raise ValueError(f"{name} ({table[name]!r}) must be a table of options")
    section = module_section(table)
    kinds = {recipe.module.__name__ for recipe in (*PRETRAINING.values(), *FINETUNING.values())}
    class_path = str((table.get("model") or {}).get("class_path") or "")
    if class_path and class_path.rpartition(".")[2] not in kinds:
        return None
    if (script := script_of(path)) in GUIDED:
        return GUIDED[script]
    if is_causal_recipe(path):
        return CAUSAL
    if section.get("config") is not None:
        return PRETRAINING[kind_of(table, section, None)[0]]
    folder = section.get("path")
    if not isinstance(folder, str) or not Path(folder).exists():
        raise ValueError(
            f"it has no model.config, and model.path ({folder}) is no folder here; in a copy of the file set "
            "model.path to the folder of a Hugging Face model"
        )
    try:
        model = model_of_folder(Path(folder))
    except ValueError:
        # It may be a model of transformers that is trained as it is.
        return FINETUNING["gpt"]
    kind = next(name for name, known in KINDS.items() if type(model) is known)
    return FINETUNING[kind if kind in FINETUNING else "gpt"]
