"""Files and folders that describe a model, or a run of one."""

from pathlib import Path

from lightning_megatron.cli.shipped_recipes import recipe_file, script_of
from lightning_megatron.hf.families import FAMILIES, family_of_file
from lightning_megatron.hf.folder import read_config
from lightning_megatron.hub import CONFIG_FILES, model_folder
from lightning_megatron.models import BertConfig, GPTConfig, LlavaConfig, T5Config
from lightning_megatron.planner.model_parts import Model
from lightning_megatron.planner.presets import PRESETS
from lightning_megatron.text_files import read_table

KINDS: dict[str, type[Model]] = {"gpt": GPTConfig, "bert": BertConfig, "t5": T5Config, "llava": LlavaConfig}
"""Configurations of models by the names of `--model-kind`."""

_BESIDE_A_FROZEN_MODEL = ("dpo_hf.py", "distill_hf.py")


def model_of_folder(path: Path) -> Model:
    """The model of a folder's config.json, or of such a file, whatever its name."""
    raw = read_config(path) if path.is_dir() else read_table(path)
    where = path / "config.json" if path.is_dir() else path
    family = family_of_file(raw, str(where))
    try:
        return family.config(raw)
    except ValueError as error:
        head, *faults = (line.strip() for line in str(error).splitlines())
        raise ValueError(" ".join([head.replace("config.json", str(where), 1), "; ".join(faults)])) from error


def trains_unchanged(config: str, model: str | None) -> bool:
    """Whether CONFIG trains a network that knows nothing of ranks: a module in a file of the user's, a recipe of
    `CausalModule`, or one that fine-tunes a type of model which is of no family here. `model` takes the place of the
    recipe's own path."""
    path = Path(config)
    if ":" in config and config.rpartition(":")[2].isidentifier() and not path.exists():
        return True
    if is_causal_recipe(path):
        return True
    data = read_table(path) if path.is_file() else {}
    section = data.get("model")
    if not isinstance(section, dict) or "model_type" in data or isinstance(section.get("config"), dict):
        return False
    options = section.get("init_args") or {} if "class_path" in section else section
    name = str(model or (options.get("path") if isinstance(options, dict) else None) or "")
    folder = Path(model_folder(name, CONFIG_FILES))
    if not name or not folder.exists():
        return False
    raw = read_config(folder) if folder.is_dir() else read_table(folder)
    return "model_type" in raw and str(raw["model_type"]) not in FAMILIES


def planned_file(config: str) -> str:
    """CONFIG, or the file of the shipped recipe that it names; a preset comes before a recipe of its name.

    Raises ValueError for a recipe that trains a model beside a frozen one, and for a module's file without its class.
    """
    if Path(config).suffix == ".py":
        raise ValueError(f"{config} is a file of Python; name the LightningModule in it, as in {config}:MyModule")
    file = recipe_file(config, PRESETS)
    if (script := script_of(Path(file))) in _BESIDE_A_FROZEN_MODEL:
        raise ValueError(
            f"{config} is a recipe of {script}, which trains a model beside a frozen one, and only runs of one model "
            "are planned; plan one of finetune_hf.py with the same model and layout, and leave room for the other one"
        )
    return file


def is_causal_recipe(path: Path) -> bool:
    """Whether a file is a recipe of this package's `CausalModule`, by its class or by the option that it alone has."""
    model = read_table(path).get("model") if path.is_file() else None
    if not isinstance(model, dict):
        return False
    class_path = str(model.get("class_path") or "")
    # A bare name is that of a class which the recipe's parser knows.
    is_own = class_path == "CausalModule" or class_path.partition(".")[0] == "lightning_megatron"
    return "from_scratch" in model or (is_own and class_path.rpartition(".")[2] == "CausalModule")
