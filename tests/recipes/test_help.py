"""Every option that a user can set has a sentence of help, in `--help` and beneath it."""

import inspect
import runpy
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import jsonargparse
import pytest
from lightning.pytorch.cli import LightningArgumentParser

from lightning_megatron.cli import recipe as module
from lightning_megatron.cli.recipe import RecipeCLI
from lightning_megatron.trainer import MegatronStrategy

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*_*.py"))
SCRIPTS = [path for path in RECIPES if "run_recipe" in path.read_text()]
# What Lightning and jsonargparse add by themselves: the Trainer's options, the files of a parser, subcommands.
LIGHTNINGS = ("trainer", "config", "print_config", "help", "seed_everything")


class Built(Exception):
    """Raised as soon as there is a parser."""


class Parser(RecipeCLI):
    """Stops before arguments are parsed."""

    found: LightningArgumentParser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        type(self).found = self._subcommand_parsers["fit"]
        raise Built


def parser_of(script: Path, monkeypatch: pytest.MonkeyPatch) -> LightningArgumentParser:
    """The parser of a recipe's `fit`."""
    taken: dict[str, Any] = {}
    monkeypatch.setattr(module, "run_recipe", lambda *classes, **options: taken.update(classes=classes, **options))
    runpy.run_path(str(script), run_name="__main__")
    with pytest.raises(Built):
        Parser(*taken.pop("classes"), **taken, args=["fit", "--help"])
    return Parser.found


def options_of(parser: LightningArgumentParser) -> Iterator[tuple[str, str, Any]]:
    """Name, help and type of each option of a parser; groups and files of options left out."""
    for action in parser._actions:
        name, text = action.dest, action.help or ""
        is_group = any(other.dest.startswith(f"{name}.") and other.dest != f"{name}.help" for other in parser._actions)
        if is_group or name.endswith(".help") or name.split(".")[0] in LIGHTNINGS:
            continue
        yield name, text, getattr(action, "_typehint", action.type)


def dataclasses_in(hint: Any) -> Iterator[type]:
    """The dataclasses that a type is made of."""
    if isinstance(hint, type) and get_origin(hint) is None and is_dataclass(hint):
        yield hint
    for part in get_args(hint):
        yield from dataclasses_in(part)


def without_help(parser: LightningArgumentParser, seen: set[type]) -> list[str]:
    """Options that have no help, those of the dataclasses beneath options among them."""
    bare = []
    for name, text, hint in options_of(parser):
        if text in ("", "==SUPPRESS==") or text.startswith(("(", "%(")):
            bare.append(name)
        for kind in set(dataclasses_in(hint)) - seen:
            seen.add(kind)
            bare += [f"{kind.__name__}{name.removeprefix('of')}" for name in without_help(beneath(kind), seen)]
    return bare


def beneath(kind: type) -> LightningArgumentParser:
    parser = LightningArgumentParser()
    parser.add_class_arguments(kind, "of")
    return parser


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_option_of_a_recipe_has_help(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = parser_of(script, monkeypatch)
    assert len(list(options_of(parser))) > 20
    assert without_help(parser, set()) == []


def test_every_argument_of_the_strategy_has_help() -> None:
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = beneath(MegatronStrategy)
    assert {name.split(".")[1] for name, _, _ in options_of(parser)} == set(
        inspect.signature(MegatronStrategy).parameters
    )
    assert without_help(parser, set()) == []


def test_a_field_without_a_docstring_is_found() -> None:
    parser = LightningArgumentParser()
    parser.add_argument("--said", type=int, help="A number.")
    parser.add_argument("--bare", type=int)
    assert without_help(parser, set()) == ["bare"]
