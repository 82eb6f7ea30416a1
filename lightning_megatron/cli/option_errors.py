"""Errors of jsonargparse in one line, without the types that it tried on the way."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import takewhile
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

STRATEGY = "trainer.strategy.init_args"
"""Path of MegatronStrategy's options in a recipe."""

# How jsonargparse names an option that does not exist.
_UNKNOWN = (r"^unrecognized arguments: --([\w.]+)", r"[Oo]ption '([\w.]+)'")
# Beginning of its message about an argument that may be of several types.
_TRIED = "Does not validate against"
_ON_THE_WAY = (_TRIED, "Subtypes:", "Errors:", "Expected a", "Given value", "Problem with given")
_OF_CLASSES = ("Not a valid subclass of", "Subclass types expect", "a class path (", "a dict with")
_WHERE = "Parser key"
_WORDS = "typing.Literal["
_NAMES = {
    "<class 'int'>": "a whole number",
    "<class 'float'>": "a number",
    "<class 'bool'>": "true or false",
    "<class 'str'>": "text",
    "<class 'NoneType'>": "null",
}


def about_option(text: str, names: Sequence[str]) -> str:
    """One line with the error of an option; for an unknown option, with the nearest known one."""
    option, text = _innermost(text)
    lines = error_lines(text) if _TRIED in text else text.splitlines()
    line = " ".join(dict.fromkeys(line.strip() for line in lines)).removeprefix(f"{_WHERE}:").strip()
    # The value, unless it is an option within the option.
    if given := re.findall(r"^ *Given value: (?!NestedArg)(.*)", text, re.MULTILINE):
        line = _with_value(option, line, given[-1])
    elif single := re.fullmatch(r"Expected an? (.+?)\. Got value: ?(.*)", line, re.DOTALL):
        kind, value = single.groups()
        rule = f"must be {_rule_of_kind(kind)}"
        line = f"{option}: {rule}, and is not given" if value == "None" else _with_value(option, rule, value)
    elif option:
        line = f"{option}: {line}"
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
    # That a file of this name would do, too, is seldom what one wants to know.
    pattern = r"Expected an? (?!path)(.+?)(\.? Got value.*)?$"
    expected = [found[1] for line in lines if (found := re.match(pattern, line))]
    # The list of an option's words helps more than that an option may be a class.
    words = [_rule_of_kind(name) for name in expected if name.startswith(_WORDS)]
    classes = [found[1] for line in lines if (found := re.match(rf"{_OF_CLASSES[0]} (\w+)", line))]
    kinds = [*map(_kind, expected), *(f"the class_path of a {name}" for name in classes)]
    reasons = [line for line in lines if not line.startswith((*_ON_THE_WAY, *_OF_CLASSES, "Expected a"))]
    if reasons:
        return f"is not taken: {'; '.join(reasons)}"
    return f"must be {' or '.join(dict.fromkeys(words or kinds))}"


def _lines(text: str) -> list[str]:
    return [line.strip().removeprefix("- ") for line in text.splitlines() if line.strip()]


def _innermost(text: str) -> tuple[str, str]:
    """The option that an error is about, and the part of the text about it alone, whose first line names no option."""
    lines, names, start, indent = text.splitlines(), [], 0, -1
    for number, line in enumerate(lines):
        place = re.match(rf'( *){_WHERE} "([\w.]+)":', line)
        # Errors within errors are indented; beside each other they are those of one option's types.
        if place and len(place[1]) > indent:
            names.append(place[2])
            start, indent = number, len(place[1])
    if not names:
        return "", text
    within = takewhile(lambda line: not line or line.startswith(" " * (indent + 1)), lines[start + 1 :])
    first, *others = names
    option = ".".join([STRATEGY, *others]) if others and STRATEGY.startswith(f"{first}.") else ": ".join(names)
    return f"--{option}", "\n".join([re.sub(rf'^ *{_WHERE} "[\w.]+"', _WHERE, lines[start]), *within])


def _with_value(option: str, line: str, value: str) -> str:
    """A line about an option with its value where errors have it, or at the end."""
    if "is not accepted" in line:
        return f"{option}: {line}"
    return f"{option} ({value}) {line}" if line.startswith(("must ", "is ")) else f"{option}: {line}; given: {value}"


def _rule_of_kind(name: str) -> str:
    return f"one of {name[len(_WORDS) : -1]}" if name.startswith(_WORDS) else _kind(name)


def _kind(name: str) -> str:
    if name.startswith("dot import path"):
        return "the dotted path of a class (as lightning.pytorch.callbacks.Timer)"
    return _NAMES.get(name) or re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"a \1", name)
