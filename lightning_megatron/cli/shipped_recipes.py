"""The recipes that the package ships: each is a configuration, and the script that the first line of it names.

In a checkout they are beside the package, in `recipes/`; a wheel has them within it, as `pyproject.toml` says.
"""

import re
from collections.abc import Container
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from lightning_megatron.cli.usage import UsageError
from lightning_megatron.text_files import MOST_YAML_BYTES, read_text

_SCRIPT = re.compile(r"# Script: (\w+\.py)\n")
_LONGEST_FIRST_LINE = 200
_SENTENCE_END = re.compile(r"[.:](?: |$)")


@dataclass(frozen=True, kw_only=True)
class ShippedRecipe:
    """A configuration by its name, and the script that trains by it."""

    name: str
    trains: str
    """What it trains: the beginning of the comment in its file."""
    script: Path
    config: Path


def shipped_recipes() -> list[ShippedRecipe]:
    """All recipes, those of one script together."""
    folder = _folder()
    found = [_recipe_of(config, folder) for config in (folder / "configs").iterdir() if config.suffix == ".yaml"]
    return sorted(found, key=lambda recipe: (recipe.script.name, recipe.name))


def shipped_recipe(name: str) -> ShippedRecipe:
    """The recipe of that name. Raises UsageError with the known names where there is none."""
    known = {recipe.name: recipe for recipe in shipped_recipes()}
    if name in known:
        return known[name]
    if Path(name).is_file():
        script = script_of(Path(name)) or "SCRIPT"
        raise UsageError([f"{name!r} is a file, not the name of a recipe; python {script} fit --config {name} runs it"])
    nearest = get_close_matches(Path(name).name.removesuffix(".yaml"), known, n=3)
    hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
    raise UsageError([f"there is no recipe {name!r}{hint}", f"there are {', '.join(known)}"])


def recipe_file(name: str, others: Container[str] = ()) -> str:
    """The file of the recipe of that name, where it is the name of nothing else: no path, and none of the `others`."""
    if name in others or Path(name).exists():
        return name
    return next((str(recipe.config) for recipe in shipped_recipes() if recipe.name == name), name)


def script_of(config: Path) -> str:
    """Name of the script in the first line of a configuration; empty where the file has none, or is none."""
    if config.suffix not in (".yaml", ".yml") or not config.is_file():
        return ""
    # Whoever reads all of it tells what is wrong with it.
    with config.open(encoding="utf-8", errors="replace") as file:
        first = _SCRIPT.match(file.readline(_LONGEST_FIRST_LINE))
    return first[1] if first else ""


def _folder() -> Path:
    package = Path(str(files("lightning_megatron")))
    shipped = package / "recipes"
    return shipped if shipped.is_dir() else package.parent / "recipes"


def _recipe_of(config: Path, folder: Path) -> ShippedRecipe:
    text = read_text(config, MOST_YAML_BYTES)
    first = _SCRIPT.match(text)
    assert first, f"{config} has no script in its first line"
    comment = re.match(r"(?:#.*\n)*", text[first.end() :])
    words = " ".join(line.removeprefix("#").strip() for line in comment[0].splitlines()) if comment else ""
    return ShippedRecipe(
        name=config.stem, trains=_SENTENCE_END.split(words, maxsplit=1)[0], script=folder / first[1], config=config
    )
