"""The recipes that `plan` reads are those of the scripts that users run."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.cli import recipe
from lightning_megatron.cli.recipe_reader import FINETUNING, GUIDED, PRETRAINING, Recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.mark.parametrize(
    ("script", "known"),
    [
        *((f"pretrain_{kind}", recipe) for kind, recipe in PRETRAINING.items()),
        ("finetune_hf", FINETUNING["gpt"]),
        ("finetune_t5", FINETUNING["t5"]),
        *((script.removesuffix(".py"), recipe) for script, recipe in GUIDED.items()),
    ],
)
def test_a_recipe_s_classes_and_links_are_those_of_its_script(
    script: str, known: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def run_recipe(module: type, data: type, *, links: Any, callbacks: Any) -> None:
        found.append(Recipe(module, data, links, callbacks))

    monkeypatch.setattr(recipe, "run_recipe", run_recipe)
    runpy.run_path(str(RECIPES / f"{script}.py"), run_name="__main__")
    assert found == [known]
