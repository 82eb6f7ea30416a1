"""Errors of jsonargparse in one line, without the types that it tried on the way."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

STRATEGY = "trainer.strategy.init_args"
"""Path of MegatronStrategy's options in a recipe."""

# How jsonargparse names an option that does not exist.
_UNKNOWN = (r"^unrecognized arguments: --([\w.]+)", r"[Oo]ption '([\w.]+)'")
# Beginning of its message about an argument that may be of several types.
_TRIED = "Does not validate against"
_ON_THE_WAY = (_TRIED, "Subtypes:", "Errors:", "Expected a <class", "Given value", "Problem with given")
_OF_CLASSES = ("Not a valid subclass of", "Subclass types expect", "a class path (", "a dict with")
_WHERE = "Parser key"
_NAMES = {
    "<class 'int'>": "a whole number",
    "<class 'float'>": "a number",
    "<class 'bool'>": "true or false",
    "<class 'str'>": "text",
    "<class 'NoneType'>": "null",
}


def about_option(text: str, names: Sequence[str]) -> str:
    """One line with the error of an option; for an unknown option, with the nearest known one."""
    lines = error_lines(text) if _TRIED in text else text.splitlines()
    # The value, unless it is an option within the option.
    lines += re.findall(r"^  Given value: (?!NestedArg).*", text, re.MULTILINE)[:1]
    line = re.sub(r'^Parser key "([\w.]+)":', r"--\1:", " ".join(line.strip() for line in lines))
    line = re.sub(r"Subcommand '\w+' does not accept option '([\w.]+)'", r"Option '\1' is not accepted", line)
    line = re.sub(r"Group '([\w.]+)' does not accept option '([\w.]+)'", r"Option '\1.\2' is not accepted", line)
    line = re.sub(r"'\w+' object has no attribute 'keys'", "must be a table of options", line)
    unknown = [name for pattern in _UNKNOWN for name in re.findall(pattern, line)]
    # For options of the strategy it gives the last name alone.
    known = {name.removeprefix(f"{STRATEGY}."): name for name in names} | {name: name for name in names}
    nearest = [known[near] for name in unknown for near in get_close_matches(name, known, 1)]
    return line + "".join(f"; the nearest is --{name}" for name in nearest)


def settings_of(annotation: Any, settings: Any) -> Any:
    """The dataclass that parsed settings make. Raises ValueError with its errors about their values."""
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("--settings", type=annotation)
    return parser.instantiate(Namespace(settings=settings)).settings


def settings_faults(annotation: Any, settings: Any) -> list[str]:
    """Errors of a dataclass about the values of its parsed settings; empty where it takes them."""
    try:
        settings_of(annotation, settings)
    except ValueError as error:
        return error_lines(str(error))
    return []


def error_lines(text: str) -> list[str]:
    """The lines of an error without those that list the types that were tried."""
    lines = _lines(text)
    found = [line for line in lines if not line.startswith((*_ON_THE_WAY, *_OF_CLASSES))]
    if len(found) < len(lines) and all(line.startswith(_WHERE) for line in found):
        found.append(rule_of(text))
    return found


def rule_of(text: str) -> str:
    """Rule that the value breaks: reasons beyond its type or, where there are none, the types that would do."""
    lines = [line for line in _lines(text) if not line.startswith(_WHERE)]
    expected = [found[1] for line in lines if (found := re.match(r"Expected an? (.+?)(\.? Got value.*)?$", line))]
    # The list of an option's words helps more than that an option may be a class.
    words = [f"one of {found[1]}" for name in expected if (found := re.match(r"typing\.Literal\[(.*)\]", name))]
    classes = [found[1] for line in lines if (found := re.match(rf"{_OF_CLASSES[0]} (\w+)", line))]
    kinds = [*map(_kind, expected), *(f"the class_path of a {name}" for name in classes)]
    reasons = [line for line in lines if not line.startswith((*_ON_THE_WAY, *_OF_CLASSES, "Expected a"))]
    if reasons:
        return f"is not taken: {'; '.join(reasons)}"
    return f"must be {' or '.join(dict.fromkeys(words or kinds))}"


def _lines(text: str) -> list[str]:
    return [line.strip().removeprefix("- ") for line in text.splitlines()]


def _kind(name: str) -> str:
    return _NAMES.get(name) or re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"a \1", name)
