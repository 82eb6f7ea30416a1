"""Shipped configurations as the command line of their recipe reads them."""

import runpy
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning_megatron.cli.recipe import RecipeCLI
from lightning_megatron.cli.shipped_recipes import shipped_recipe
from lightning_megatron.mesh import Sizes, StageLayout

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
CONFIGS = RECIPES / "configs"


class Parsed(RecipeCLI):
    """Stops before there is a Trainer, whose devices this machine has not."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def script_of(name: str) -> Path:
    """The recipe that a configuration is for."""
    return shipped_recipe(name.removesuffix(".yaml")).script


@cache
def arguments_of(script: Path) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a recipe gives to `run_recipe`."""
    with patch("lightning_megatron.cli.recipe.run_recipe") as run:
        runpy.run_path(str(script), run_name="__main__")
    return run.call_args.args, run.call_args.kwargs


@cache
def parse(name: str, *options: str) -> Parsed:
    """The `fit` of a shipped configuration with further options; tests share it and must not change it."""
    classes, keywords = arguments_of(script_of(name))
    return Parsed(*classes, **keywords, args=["fit", "--config", str(CONFIGS / name), *options])


def sizes_of(parsed: Parsed) -> Sizes:
    """The mesh that a configuration asks for."""
    trainer = parsed.config["fit"]["trainer"]
    options = trainer["strategy"]["init_args"]
    return Sizes(
        world=trainer["devices"] * trainer["num_nodes"],
        tp=options["tensor_model_parallel_size"],
        pp=options["pipeline_model_parallel_size"],
        cp=options["context_parallel_size"],
        ep=options["expert_model_parallel_size"],
        etp=options["expert_tensor_parallel_size"],
        vp=options["virtual_pipeline_model_parallel_size"],
        sequence_parallel=options["sequence_parallel"],
        stage_layout=StageLayout(**(options["pipeline"]["layout"] if options["pipeline"] else {})),
    )
