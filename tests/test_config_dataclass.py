"""A configuration class is frozen and keyword-only, its help lists every field, and its values are of their types."""

import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from typing import Any, Literal

import numpy as np
import pytest

from lightning_megatron import config_dataclass as module
from lightning_megatron.config_dataclass import config_dataclass


@config_dataclass
class Plain:
    """Two sizes."""

    width: int
    """Width in
    tokens."""
    depth: int = 1
    """Number of layers."""


@config_dataclass
class Deeper(Plain):
    depth: int = 2
    height: int = 0
    """Height in tokens."""


def test_the_docstring_lists_fields_in_order_and_inherited_ones_too() -> None:
    assert Plain.__doc__ == "Two sizes.\n\nAttributes:\n    width: Width in tokens.\n    depth: Number of layers."
    assert Deeper.__doc__ is not None
    assert Deeper.__doc__.splitlines()[2:] == [
        "Attributes:",
        "    width: Width in tokens.",
        "    depth: Number of layers.",
        "    height: Height in tokens.",
    ]


def test_a_subclass_without_the_decorator_keeps_its_own_docstring() -> None:
    class Own(Plain):
        """Something else."""

    assert Own.__doc__ == "Something else."


def test_the_source_is_read_only_when_the_docstring_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(module, "_attribute_docstrings", lambda kind: read.append(kind) or {})
    made = config_dataclass(type("Made", (Plain,), {"__doc__": "Made late."}))
    assert made(width=1).depth == 1
    assert read == []
    assert "Made late." in str(made.__doc__)
    assert read == [Plain, made]
    assert made(width=1).__doc__ == made.__doc__
    assert len(read) == 2


def test_it_is_frozen_keyword_only_and_pickles() -> None:
    config = Plain(width=3)
    assert pickle.loads(pickle.dumps(config)) == config
    assert pickle.loads(pickle.dumps(Plain)) is Plain
    with pytest.raises(FrozenInstanceError):
        config.width = 4  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        Plain(3)  # type: ignore[misc]


@pytest.mark.parametrize("name", ["__main__", "a_prompt_without_file"])
def test_a_class_without_source_keeps_its_summary(name: str) -> None:
    names = {"__name__": name, "config_dataclass": config_dataclass}
    exec("@config_dataclass\nclass Typed:\n    'What a user typed.'\n    size: int = 1", names)
    assert str(names["Typed"].__doc__).startswith("What a user typed.")


@config_dataclass
class Typed:
    """One field of each kind."""

    count: int = 1
    rate: float = 1.0
    word: Literal["a", "b"] = "a"
    is_on: bool = False
    pair: tuple[int, float] = (1, 1.0)
    names: tuple[str, ...] = ()
    texts: list[str] | None = None
    table: Mapping[str, str] | None = None
    inner: Plain | None = None

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count ({self.count}) must be at least 0")


@pytest.mark.parametrize(
    "values",
    [
        {"count": np.int64(2), "rate": 1, "is_on": True},
        {"rate": np.float32(0.5), "pair": (2, 3), "names": ["a"], "texts": ["b"]},
        {"table": {"a": "b"}, "inner": Deeper(width=1)},
        # A word that is none of those is left to the check that lists them.
        {"word": "c"},
    ],
)
def test_values_of_the_types_are_taken(values: dict[str, Any]) -> None:
    made = Typed(**values)
    assert all(getattr(made, name) is value for name, value in values.items())


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"count": "2"}, "int"),
        ({"count": 2.0}, "int"),
        ({"count": True}, "int"),
        ({"rate": "1e-5"}, "float"),
        ({"word": 1}, "'a' or 'b'"),
        ({"is_on": "no"}, "bool"),
        ({"is_on": 1}, "bool"),
        ({"pair": (1,)}, "tuple[int, float]"),
        ({"names": "a"}, "tuple[str, ...]; write ('a',)"),
        ({"texts": [1]}, "list[str] or None"),
        ({"inner": {"width": 1}}, "Plain or None"),
    ],
)
def test_a_value_of_another_type_is_told_with_the_type(values: dict[str, Any], rule: str) -> None:
    [(name, value)] = values.items()
    with pytest.raises(ValueError) as refused:
        Typed(**values)
    assert str(refused.value) == f"{name} ({value!r}) of Typed must be of type {rule}"


def test_types_are_told_all_at_once_and_before_other_checks() -> None:
    with pytest.raises(ValueError, match=r"^count \(None\) .* int\nis_on \('no'\) .* bool$"):
        Typed(count=None, is_on="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^count \(-1\) must be at least 0$"):
        Typed(count=-1)
