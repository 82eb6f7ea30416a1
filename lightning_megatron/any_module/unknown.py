"""`Unknown`: what a stage of a cut model does not have, and whatever is computed from it.

A stage's forward runs as it is written, with placeholders for what other stages have. Numbers of a placeholder that are
read stay placeholders: masks, indices and comparisons too, which no NaN would show.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# They read a shape, a dtype and a device, and no numbers.
_OF_SHAPES = frozenset(
    f"{kind}_like" for kind in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")
) | frozenset(f"new_{kind}" for kind in ("zeros", "ones", "full", "empty", "tensor"))
# They read the numbers of their first argument, and of another its shape, dtype or device.
_BY_FIRST = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})


class Unknown(Tensor):
    """A tensor whose numbers nobody may read: NaN, or an index that no table has."""

    @staticmethod
    def like(tensor: Tensor, *, is_marked: bool = True) -> Tensor:
        """A placeholder of the shape and the dtype of a tensor; one that is not marked is a plain tensor."""
        if tensor.is_floating_point():
            found = torch.full_like(tensor, torch.nan, requires_grad=False)
        else:
            found = torch.full_like(tensor, True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)
        return found.as_subclass(Unknown) if is_marked else found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _OF_SHAPES or (name in _BY_FIRST and not isinstance(args[0], Unknown)):
            return result.as_subclass(Tensor)
        return result


def has_unknown(value: Any) -> bool:
    """Whether any tensor of nested values is a placeholder, or computed from one."""
    return any(isinstance(leaf, Unknown) for leaf in tree_leaves(value))
