"""The decorator of configuration classes, whose `help()` shows the docstring of every field.

Python itself keeps no docstring of a field. Editors, Sphinx and jsonargparse read it from the source, and so does this
module, when the `__doc__` of a class is first asked for.
"""

import ast
import inspect
import textwrap
from dataclasses import dataclass, fields
from typing import Any, TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def config_dataclass(cls: type[_T]) -> type[_T]:
    """Makes a class a frozen, keyword-only dataclass whose `__doc__` lists all fields with their docstrings."""
    made = dataclass(frozen=True, kw_only=True)(cls)
    made.__doc__ = _FieldHelp(made.__doc__ or "")  # type: ignore[assignment]
    return made


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
