"""Every option that a user can set has a sentence of help, in `--help` and beneath it."""

import inspect
import pydoc
import re
import runpy
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

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


def arguments_of(script: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a recipe calls `run_recipe` with; its module and data module under "classes"."""
    taken: dict[str, Any] = {}
    monkeypatch.setattr(module, "run_recipe", lambda *classes, **options: taken.update(classes=classes, **options))
    runpy.run_path(str(script), run_name="__main__")
    return taken


def parser_of(script: Path, monkeypatch: pytest.MonkeyPatch) -> LightningArgumentParser:
    """The parser of a recipe's `fit`."""
    taken = arguments_of(script, monkeypatch)
    with pytest.raises(Built):
        Parser(*taken.pop("classes"), **taken, args=["fit"])
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


# ----------------------------------------------------------------------------------------------------------------------
# help() of Python


def configurations_of(kind: Callable[..., Any], seen: set[type]) -> set[type]:
    """Adds the dataclasses that a class or a function takes, those that they hold, and their base classes."""
    constructors: list[Any] = [kind]
    if isinstance(kind, type):
        constructors = [base.__init__ for base in kind.__mro__ if base.__module__.startswith("lightning_megatron")]
    hints = [hint for constructor in constructors for hint in get_type_hints(constructor).values()]
    for config in {base for hint in hints for found in dataclasses_in(hint) for base in found.__mro__[:-1]} - seen:
        seen.add(config)
        configurations_of(config, seen)
    return seen


def not_in_help(kind: type) -> list[str]:
    """Fields of a dataclass whose meaning its `help()` does not show."""
    shown = pydoc.render_doc(kind, renderer=pydoc.plaintext)
    return [
        f"{kind.__name__}.{field.name}"
        for field in fields(kind)
        if not re.search(rf"^ \|  +{field.name}: \S", shown, re.M)
    ]


def test_help_shows_every_field_of_every_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [arguments_of(script, monkeypatch) for script in SCRIPTS]
    roots = {MegatronStrategy, *(kind for each in taken for kind in (*each["classes"], *each["callbacks"].values()))}
    configurations: set[type] = set()
    for root in roots:
        configurations_of(root, configurations)
    assert len(configurations) > 30
    assert [name for kind in configurations for name in not_in_help(kind)] == []


def test_help_of_the_strategy_shows_every_argument() -> None:
    shown = pydoc.render_doc(MegatronStrategy, renderer=pydoc.plaintext)
    names = inspect.signature(MegatronStrategy).parameters
    assert [name for name in names if not re.search(rf"^ \|  +{name}: [A-Z]", shown, re.M)] == []


def test_a_field_that_help_does_not_show_is_found() -> None:
    assert not_in_help(make_dataclass("Bare", [("width", int)])) == ["Bare.width"]
