"""What a layer returns, taken apart into its tensors and a text that says how to put them together again.

The text travels with the tensors from stage to stage, as the name of the first of them: a stage that does not have a
layer learns from it what the layer returns.
"""

import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def taken_apart(value: Any) -> tuple[str, list[Tensor]]:
    """The text and the tensors of nested tuples, lists and dicts. Raises TypeError for what else holds tensors."""
    tensors: list[Tensor] = []

    def described(item: Any) -> Any:
        match item:
            case Tensor():
                tensors.append(item)
                return {"tensor": len(tensors) - 1}
            case tuple() if type(item) is tuple:
                return {"tuple": [described(one) for one in item]}
            case list():
                return [described(one) for one in item]
            case dict() if type(item) is dict and all(isinstance(key, str) for key in item):
                return {"dict": {key: described(one) for key, one in item.items()}}
            case None | bool() | int() | float() | str():
                return item
        raise TypeError(type(item).__name__)

    return json.dumps(described(value), separators=(",", ":")), tensors


def put_together(text: str, tensors: Sequence[Tensor]) -> Any:
    """The value that `taken_apart` made a text of, with these tensors in it."""

    def built(item: Any) -> Any:
        match item:
            case {"tensor": index}:
                return tensors[index]
            case {"tuple": items}:
                return tuple(built(one) for one in items)
            case {"dict": items}:
                return {key: built(one) for key, one in items.items()}
            case list():
                return [built(one) for one in item]
        return item

    return built(json.loads(text))
