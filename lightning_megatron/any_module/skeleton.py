"""What a layer returns, taken apart into its tensors and a text that says how to put them together again.

The text travels with the tensors from stage to stage, as the name of the first of them: a stage that does not have a
layer learns from it what the layer returns.
"""

import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor

# Functions that call themselves stand here: one within another is a cycle, and would hold tensors until it is found.


def taken_apart(value: Any) -> tuple[str, list[Tensor]]:
    """The text and the tensors of nested tuples, lists and dicts. Raises TypeError for what else holds tensors."""
    tensors: list[Tensor] = []
    return json.dumps(_described(value, tensors), separators=(",", ":")), tensors


def _described(item: Any, tensors: list[Tensor]) -> Any:
    match item:
        case Tensor():
            tensors.append(item)
            return {"tensor": len(tensors) - 1}
        case tuple() if type(item) is tuple:
            return {"tuple": [_described(one, tensors) for one in item]}
        case list():
            return [_described(one, tensors) for one in item]
        case dict() if type(item) is dict and all(isinstance(key, str) for key in item):
            return {"dict": {key: _described(one, tensors) for key, one in item.items()}}
        case None | bool() | int() | float() | str():
            return item
    raise TypeError(type(item).__name__)


def put_together(text: str, tensors: Sequence[Tensor]) -> Any:
    """The value that `taken_apart` made a text of, with these tensors in it."""
    return _built(json.loads(text), tensors)


def _built(item: Any, tensors: Sequence[Tensor]) -> Any:
    match item:
        case {"tensor": index}:
            return tensors[index]
        case {"tuple": items}:
            return tuple(_built(one, tensors) for one in items)
        case {"dict": items}:
            return {key: _built(one, tensors) for key, one in items.items()}
        case list():
            return [_built(one, tensors) for one in item]
    return item
