"""Frozen dataclasses from what YAML or JSON gives: tables, lists, words and numbers, checked against the fields' types.

A command reads a recipe's file with it, without the packages that run recipes. Faults are collected, with their places.
"""

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def made_of(kind: type[T], data: object, where: str, faults: list[str]) -> T | None:
    """A dataclass of that kind; None, with the faults added to the list, where the data does not make one."""
    if not isinstance(data, Mapping):
        faults.append(f"{where} ({data!r}) must be a table of fields")
        return None
    known = {field.name: field for field in fields(kind) if field.init}  # type: ignore[arg-type]
    hints, before = get_type_hints(kind), len(faults)
    for name in data:
        if name not in known:
            nearest = get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            faults.append(f"{where}.{name} is not known{hint}")
    needed = [f.name for f in known.values() if f.default is MISSING and f.default_factory is MISSING]
    faults += [f"{where}.{name} is missing" for name in needed if name not in data]
    values = {
        name: value_of(hints[name], value, f"{where}.{name}", faults) for name, value in data.items() if name in known
    }
    if len(faults) > before:
        return None
    try:
        return kind(**values)
    except ValueError as error:
        faults += [f"{where}: {line}" for line in str(error).splitlines()]
        return None


def value_of(hint: Any, value: Any, where: str, faults: list[str]) -> Any:
    """What the data is as a value of that type; anything where it is none, with the faults added to the list."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        options = get_args(hint)
        if value is None and type(None) in options:
            return None
        return _first_that_fits([option for option in options if option is not type(None)], value, where, faults)
    if origin is Literal:
        if value not in get_args(hint):
            faults.append(f"{where} ({value!r}) must be one of {', '.join(map(repr, get_args(hint)))}")
        return value
    if origin in (tuple, list):
        if not isinstance(value, (list, tuple)):
            faults.append(f"{where} ({value!r}) must be a list")
            return origin()
        return origin(value_of(get_args(hint)[0], one, f"{where}[{place}]", faults) for place, one in enumerate(value))
    if is_dataclass(hint):
        return made_of(hint, value, where, faults)  # type: ignore[arg-type]
    return _scalar(hint, value, where, faults)


def _first_that_fits(options: list[Any], value: Any, where: str, faults: list[str]) -> Any:
    for option in options:
        found: list[str] = []
        made = value_of(option, value, where, found)
        if not found:
            return made
    faults += found
    return None


def _scalar(hint: Any, value: Any, where: str, faults: list[str]) -> Any:
    # YAML takes 1e-5 for a word.
    if hint is float and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    fits = isinstance(value, (int, float)) if hint is float else isinstance(value, hint)
    if not fits or (isinstance(value, bool) and hint is not bool):
        faults.append(f"{where} ({value!r}) must be {'a number' if hint in (int, float) else f'a {hint.__name__}'}")
    return value
