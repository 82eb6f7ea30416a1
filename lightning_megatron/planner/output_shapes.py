"""Outputs of operations on meta tensors, whose shapes are computed once.

Torch's own shape functions are slow, and a dry run calls most of them with the same arguments in every layer and
microbatch. What an operation writes to is its output already.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Shape(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class OutputShapes:
    """Runs operations on meta tensors; `shaped` are those that do not tell their shapes themselves."""

    def __init__(self, shaped: Mapping[Any, Callable[..., Any]]) -> None:
        self._shaped = shaped
        # None: an output is no new tensor, or another one each time. None for one output: it is not asked for.
        self._known: dict[Any, tuple[_Shape | None, ...] | None] = {}

    def output_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation returns."""
        how = _way_of(func)
        if how == "in place" and _are_meta(args[0]):
            return args[0] if func._schema.returns else None
        if how == "out" and kwargs["out"].is_meta and kwargs["out"].numel():
            return kwargs["out"]
        run = self._shaped.get(func, func)
        if how != "new":
            return run(*args, **kwargs)
        # The default is the dtype of integers over numbers.
        key = func, _key_of(args), _key_of(tuple(kwargs.items())), torch.get_default_dtype()
        if (shapes := self._known.get(key)) is not None:
            outputs = [None if shape is None else _made(shape) for shape in shapes]
            return outputs[0] if len(func._schema.returns) == 1 else tuple(outputs)
        output = run(*args, **kwargs)
        if key not in self._known:
            self._known[key] = _shapes_of(output, args)
        return output


@cache
def _way_of(func: Any) -> str:
    """Whether an operation writes to its first argument ("in place"), to its last ("out"), or makes what is "new"."""
    schema = func._schema
    if schema.is_mutable:
        is_in_place = schema.name.endswith("_") and torch.Tag.inplace_view not in func.tags and len(schema.returns) < 2
        is_out = len(schema.returns) == 1 and any(argument.name == "out" for argument in schema.arguments)
        return "in place" if is_in_place else "out" if is_out else ""
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    makes_tensors = all(str(one.type) == "Tensor" and one.alias_info is None for one in schema.returns)
    return "new" if takes_tensors and makes_tensors and schema.returns else ""


def _are_meta(written: Tensor | list[Tensor]) -> bool:
    return all(x.is_meta for x in ([written] if isinstance(written, Tensor) else written))


def _key_of(argument: Any) -> Any:
    """All of an argument that an output's shape goes by."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device.type
    if isinstance(argument, (list, tuple)):
        return tuple(map(_key_of, argument))
    # 1 == True == 1.0
    return type(argument), argument


def _made(shape: _Shape) -> Tensor:
    return torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype, device="meta")


def _shapes_of(output: Any, args: tuple[Any, ...]) -> tuple[_Shape | None, ...] | None:
    """The shapes of new dense tensors, None for one that is not asked for; None where an output is anything else."""
    outputs = output if isinstance(output, (list, tuple)) else (output,)
    given = {one.untyped_storage()._cdata for one in args if isinstance(one, Tensor)}
    shapes: list[_Shape | None] = []
    for one in outputs:
        if one is None and isinstance(output, tuple):
            shapes.append(None)
            continue
        if not isinstance(one, Tensor) or not one.is_meta or one.untyped_storage()._cdata in given:
            return None
        shape = _Shape(tuple(one.shape), one.stride(), one.dtype)
        if one.storage_offset() or _made(shape).untyped_storage().nbytes() != one.untyped_storage().nbytes():
            return None
        shapes.append(shape)
    return tuple(shapes)
