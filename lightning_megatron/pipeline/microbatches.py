"""Split of a batch into microbatches along its rows, and combination of their results."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_megatron.pipeline.ragged import Ragged


def num_rows(batch: Any) -> int:
    """Rows of a batch: the first dim that its tensors share; 0 where it has no tensor with a dim.

    Raises ValueError when tensors differ in their first dim.
    """
    sizes = _sizes(batch, is_leaf=_is_record_list) or _sizes(batch)
    if len(sizes) == 1:
        # Records of the rows hold as many numbers each as they like.
        [rows] = sizes
        sizes |= _sizes(batch, is_leaf=lambda value: _is_record_list(value) and len(value) == rows)
    if len(sizes) > 1:
        raise ValueError(
            f"the tensors of a batch have {sorted(sizes)} rows; to be cut into microbatches all of them must have the "
            "same first dim; set num_microbatches=1, or give the batch one row per sample"
        )
    return sizes.pop() if sizes else 0


def _entries(value: Any) -> dict[Any, Any] | None:
    """Entries of a record that is a single leaf to pytree: a dataclass, or a user's own mapping (as of transformers);
    None for anything else."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(value) if isinstance(value, Mapping) else None


def _sizes(batch: Any, is_leaf: Callable[[Any], bool] | None = None) -> set[int]:
    """First dims of the tensors in a batch."""
    found: set[int] = set()
    for leaf in tree_flatten(batch, is_leaf=is_leaf)[0]:
        entries = _entries(leaf)
        if entries is not None:
            found |= _sizes(entries, is_leaf)
        elif isinstance(leaf, Ragged):
            found.add(leaf.num_rows)
        elif isinstance(leaf, Tensor) and leaf.dim() > 0:
            found.add(leaf.shape[0])
    return found


def _is_record_list(value: Any) -> bool:
    """Whether a value is a list, and not one of tensors."""
    return isinstance(value, list) and not any(isinstance(one, Tensor) for one in value)


def _with_entries(record: Any, entries: dict[Any, Any]) -> Any:
    """A record like the given one that holds these entries."""
    if isinstance(record, Mapping):
        return type(record)(entries)  # type: ignore[call-arg]
    changed = copy(record)
    for name, value in entries.items():
        # A frozen dataclass takes no assignment.
        object.__setattr__(changed, name, value)
    return changed


def split(batch: Any, num_microbatches: int) -> list[Any]:
    """The batch as microbatches of nearly equal rows, the larger ones first; fewer where there are fewer rows.

    Tensors are cut along dim 0 (as views), lists as long as the batch likewise, inside of dataclasses and mappings too;
    everything else goes to each microbatch uncut.
    """
    if num_microbatches == 1:
        return [batch]
    rows = num_rows(batch)
    if rows == 0:
        raise ValueError(
            f"a batch of type {type(batch).__name__} holds no rows of tensors that could be cut into "
            f"{num_microbatches} microbatches; give a dict, a tuple or a list of tensors, or set num_microbatches=1"
        )
    count = min(num_microbatches, rows)
    bounds = [rows * i // count for i in range(count + 1)]
    sizes = sorted((b - a for a, b in pairwise(bounds)), reverse=True)
    starts = [sum(sizes[:i]) for i in range(count)]

    return [_narrowed(batch, rows, start, size) for start, size in zip(starts, sizes, strict=True)]


def narrowed(batch: Any, start: int, size: int) -> Any:
    """Some rows of a batch, cut as `split` cuts it. Raises ValueError when its tensors differ in their first dim."""
    return _narrowed(batch, num_rows(batch), start, size)


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with each of its tensors changed, inside of dataclasses and mappings too."""

    def changed(value: Any) -> Any:
        entries = _entries(value)
        if entries is not None:
            return _with_entries(value, {name: map_tensors(one, change) for name, one in entries.items()})
        return change(value) if isinstance(value, Tensor) else value

    return tree_map(changed, batch)


def _narrowed(batch: Any, rows: int, start: int, size: int) -> Any:
    def is_row_list(value: Any) -> bool:
        return _is_record_list(value) and len(value) == rows

    def cut(value: Any) -> Any:
        if is_row_list(value):
            return value[start : start + size]
        if isinstance(value, Ragged):
            return value.narrow(start, size)
        entries = _entries(value)
        if entries is not None:
            return _with_entries(value, cut_all(entries))
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        part = value.narrow(0, start, size)
        # A step may change its batch in place: rows of other microbatches do not count that as a change of their own.
        return part if part.requires_grad else part.data

    def cut_all(values: Any) -> Any:
        return tree_map(cut, values, is_leaf=is_row_list)

    return cut_all(batch)


def combine(outputs: Sequence[Any], weights: Sequence[Tensor]) -> Any:
    """One output for the full batch from those of its microbatches: tensors of rows are joined, scalars averaged.

    `weights` [] each say what the scalars of each microbatch are means over.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [tree_flatten(output) for output in outputs]
    spec = flat[0][1]
    total = torch.stack(list(weights)).sum()
    # Of nothing at all (no valid token in the batch) the mean is the plain one, as on one device.
    shares = [torch.where(total > 0, weight / total, 1 / len(outputs)) for weight in weights]

    def join(values: tuple[Any, ...]) -> Any:
        if not isinstance(values[0], Tensor):
            return values[0]
        if values[0].dim() == 0:
            pairs = zip(values, shares, strict=True)
            return torch.stack([of_share(value, share) for value, share in pairs]).sum()
        return torch.cat(list(values))

    return tree_unflatten([join(values) for values in zip(*(leaves for leaves, _ in flat), strict=True)], spec)


def of_share(value: Tensor, share: Tensor) -> Tensor:
    """The part of a mean that values add to it: 0 where the share is 0, of a mean over nothing (NaN) too."""
    return torch.where(share == 0, 0, value * share.to(value.dtype))
