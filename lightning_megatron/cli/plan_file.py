"""Files and folders that describe a model, or a run of one."""

from pathlib import Path
from typing import Any

from lightning_megatron.hf.families import family_of_file
from lightning_megatron.hf.folder import read_config
from lightning_megatron.models import BertConfig, GPTConfig, LlavaConfig, T5Config
from lightning_megatron.planner.model_parts import Model
from lightning_megatron.text_files import read_table

KINDS: dict[str, type[Model]] = {"gpt": GPTConfig, "bert": BertConfig, "t5": T5Config, "llava": LlavaConfig}
"""Configurations of models by the names of `--model-kind`."""


def model_of_folder(path: Path) -> Model:
    """The model of a folder's config.json, or of such a file, whatever its name."""
    raw = read_config(path) if path.is_dir() else table_of(path)
    where = path / "config.json" if path.is_dir() else path
    family = family_of_file(raw, str(where))
    try:
        return family.config(raw)
    except ValueError as error:
        head, *faults = (line.strip() for line in str(error).splitlines())
        raise ValueError(" ".join([head.replace("config.json", str(where), 1), "; ".join(faults)])) from error


def table_of(path: Path) -> dict[str, Any]:
    """The table in a file of YAML or JSON. Raises ValueError for one that cannot be read, or is no table."""
    return read_table(path)


def is_causal_recipe(path: Path) -> bool:
    """Whether a file is a recipe of `CausalModule`, by its class or by the option that it alone has."""
    if not path.is_file():
        return False
    model = table_of(path).get("model")
    return isinstance(model, dict) and (
        "from_scratch" in model or str(model.get("class_path") or "").endswith("CausalModule")
    )
