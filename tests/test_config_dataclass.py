"""A configuration class is frozen and keyword-only, and its help lists every field."""

import pickle
from dataclasses import FrozenInstanceError

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
