"""The decorator of configuration classes: `help()` shows the docstring of every field, and values are of its types.

Python itself keeps no docstring of a field. Editors, Sphinx and jsonargparse read it from the source, and so does this
module, when the `__doc__` of a class is first asked for.
"""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def config_dataclass(cls: type[_T]) -> type[_T]:
    """Makes a class a frozen, keyword-only dataclass whose `__doc__` lists all fields with their docstrings.

    Before its own checks, in `__post_init__`, it raises ValueError with every value that is not of its field's type.
    """
    own_checks = getattr(cls, "__post_init__", lambda self: None)

    def checked(self: Any) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        kind: Any = type(self)
        if faults := type_faults(_hints_of(kind), values, f" of {kind.__name__}"):
            raise ValueError("\n".join(faults))
        own_checks(self)

    cls.__post_init__ = checked  # type: ignore[attr-defined]
    made = dataclass(frozen=True, kw_only=True)(cls)
    made.__doc__ = _FieldHelp(made.__doc__ or "")  # type: ignore[assignment]
    return made


def type_faults(hints: Mapping[str, Any], values: Mapping[str, Any], owner: str = "") -> list[str]:
    """Errors of values that are not of the annotated types, one sentence each."""
    return [
        f"{name} ({value!r}){owner} must be of type {_name_of(hints[name])}{_way_out(value, hints[name])}"
        for name, value in values.items()
        if not _is_of(value, hints[name])
    ]


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type: true and false are no numbers, whole numbers are floats, NumPy's numbers
    are numbers, and a list serves as a tuple. Words of a Literal are looked at by the checks that list them."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is_of(value, option) for option in inner)
    if origin is Literal:
        return any(type(value) is type(option) for option in inner)
    if origin in (tuple, list) and isinstance(value, (tuple, list)):
        options = inner if origin is tuple and inner[-1:] != (...,) else inner[:1] * len(value)
        return len(options) == len(value) and all(map(_is_of, value, options))
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return hint is Any or isinstance(value, origin or hint)


def _way_out(value: Any, hint: Any) -> str:
    return f"; write ({value!r},)" if get_origin(hint) is tuple and isinstance(value, str) else ""


def _name_of(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_name_of, get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if hint is NoneType:
        return "None"
    return str(hint) if get_args(hint) or not isinstance(hint, type) else hint.__name__


# Every configuration of a class asks for them.
@cache
def _hints_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


class _FieldHelp:
    """Stands as the `__doc__` of a class until it is read, then puts the text in its own place."""

    def __init__(self, summary: str) -> None:
        self._summary = summary

    def __get__(self, _: object, owner: Any) -> str:
        texts: dict[str, str] = {}
        for kind in reversed(owner.__mro__[:-1]):
            texts |= _attribute_docstrings(kind)
        named = [f"{field.name}: {texts[field.name]}" for field in fields(owner) if field.name in texts]
        wrapped = [textwrap.fill(text, 100, initial_indent=" " * 4, subsequent_indent=" " * 8) for text in named]
        owner.__doc__ = "\n".join([inspect.cleandoc(self._summary), "", "Attributes:", *wrapped])
        return str(owner.__doc__)


def _attribute_docstrings(kind: type) -> dict[str, str]:
    """The docstrings that stand under the annotated names of a class, each as one line; none without its source."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        # An installation without sources, or a class that was typed into a prompt, has no docstrings of fields to show.
        return {}
    [node] = ast.parse(textwrap.dedent(source)).body
    assert isinstance(node, ast.ClassDef)
    return {
        name: " ".join(text.split())
        for statement, below in zip(node.body, node.body[1:], strict=False)
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        )
        for name, text in [(statement.target.id, below.value.value)]
    }
