"""A checkpoint's metadata as plain data: containers, numbers, strings and tensors, so that reading it runs no code."""

import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, Tensor, nn.Parameter)


def to_bytes(data: Mapping[str, Any], title: str = "meta") -> bytes:
    """The data as bytes. Raises ValueError naming every value that is not plain."""
    if faults := list(_not_plain(dict(data), title)):
        more = f"\nand {len(faults) - 20} more" if len(faults) > 20 else ""
        raise ValueError(
            "a checkpoint's metadata is plain data (containers, numbers, strings, tensors), so that reading it runs "
            "no code; not plain:\n" + "\n".join(faults[:20]) + more
        )
    return torch_bytes(dict(data))


def from_bytes(data: bytes) -> Any:
    """The data in the bytes; raises whatever torch raises where they are damaged or would run code."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _not_plain(value: Any, where: str) -> Iterator[str]:
    """One line for each value inside `value` that would not load as plain data."""
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            yield from _not_plain(key, f"key {key!r} of {where}")
            yield from _not_plain(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for position, item in enumerate(value):
            yield from _not_plain(item, f"{where}[{position}]")
    elif type(value) not in _PLAIN:
        # dtypes, sizes, counters and what else torch takes for data: the round trip decides.
        try:
            from_bytes(torch_bytes(value))
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            yield f"  {where} is a {type(value).__module__}.{type(value).__qualname__} ({reason[:80]})"


def torch_bytes(value: Any) -> bytes:
    """The value as `torch.save` writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
