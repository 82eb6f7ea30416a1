"""A checkpoint's metadata as plain data, so that reading it runs no code, and every value has the type that it had.

    torch loads as data     containers, numbers, strings, tensors, dtypes, devices, sets, counters
    tagged here             numpy arrays and scalars, paths, frozen sets, keys of these types

A tagged value is a dictionary of `_TAG`, which names its type, and of plain data. Anything else is an error at save.
"""

import io
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (type(None), bool, int, float, complex, str, bytearray, Tensor, nn.Parameter, torch.dtype, torch.device)
_TAG = "lightning_megatron.type"
_DICTIONARIES: dict[str, Callable[[Any], Any]] = {"dict": dict, "OrderedDict": OrderedDict}
_SETS: dict[str, Callable[[Any], Any]] = {"set": set, "frozenset": frozenset}
# A path of another system comes back as one of this system.
_PATHS: dict[str, Callable[[str], PurePath]] = {
    "Path": Path,
    "PurePosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
}
_SHOWN = 20


def to_bytes(data: Mapping[str, Any], title: str = "meta") -> bytes:
    """The data as bytes. Raises ValueError naming every value that would not come back as it is."""
    if faults := faults_of(dict(data), title):
        more = f"\nand {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ValueError(
            "a checkpoint's metadata is plain data (containers, numbers, strings, tensors, numpy arrays), so that "
            "reading it runs no code; not plain:\n" + "\n".join(f"  {line}" for line in faults[:_SHOWN]) + more + "\n"
            "Save what it is made from, or leave it out (hyper-parameters: save_hyperparameters(ignore=[...]))"
        )
    return torch_bytes(_encoded(dict(data)))


def from_bytes(data: bytes) -> Any:
    """The data in the bytes; raises whatever torch raises where they are damaged or would run code."""
    return _decoded(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


def faults_of(value: Any, where: str, *, is_tagged: bool = True) -> list[str]:
    """One line for each value inside `value` that would not load as plain data and as the type that it is.

    With `is_tagged` off, as torch alone loads it.
    """
    return list(_faults(value, where, is_tagged))


def _faults(value: Any, where: str, is_tagged: bool) -> Iterator[str]:
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            yield from _faults(key, f"key {key!r} of {where}", is_tagged)
            yield from _faults(item, f"{where}[{key!r}]", is_tagged)
    elif type(value) in (list, tuple, set) or (is_tagged and type(value) is frozenset):
        for position, item in enumerate(value):
            yield from _faults(item, f"{where}[{position}]", is_tagged)
    elif type(value) not in _PLAIN and not (type(value) is bytes and value) and not (is_tagged and _is_tagged(value)):
        # Sizes, counters and what else torch takes for data: the round trip decides.
        try:
            found = type(torch.load(io.BytesIO(torch_bytes(value)), weights_only=True))
        except Exception:
            found = type(None)
        if found is not type(value):
            yield f"{where} is a {type(value).__module__}.{type(value).__qualname__}"


def _is_tagged(value: Any) -> bool:
    """Whether a value of no container is saved under a tag."""
    if type(value) is bytes:
        # The pickle of empty ones calls a function, which torch refuses.
        return not value
    if isinstance(value, (np.ndarray, np.generic)):
        # Neither Python objects nor records.
        return value.dtype.kind not in "OV" and type(value) in (np.ndarray, value.dtype.type)
    return type(value) in (PosixPath, WindowsPath, PurePosixPath, PureWindowsPath)


def _encoded(value: Any) -> Any:
    kind = type(value)
    if kind in (dict, OrderedDict):
        pairs = [(_encoded(key), _encoded(item)) for key, item in value.items()]
        if _TAG not in value and not any(isinstance(key, dict) for key, _ in pairs):
            return kind(pairs)
        return {_TAG: kind.__name__, "pairs": pairs}
    if kind in (list, tuple):
        return kind(map(_encoded, value))
    if kind in (set, frozenset):
        items = [_encoded(item) for item in value]
        is_plain = kind is set and all(item is own for item, own in zip(items, value, strict=True))
        return value if is_plain else {_TAG: kind.__name__, "items": items}
    if _is_tagged(value):
        if type(value) is bytes:
            return {_TAG: "bytes"}
        if isinstance(value, PurePath):
            return {_TAG: "Path" if isinstance(value, Path) else kind.__name__, "text": str(value)}
        name = "numpy array" if kind is np.ndarray else "numpy scalar"
        return {_TAG: name, "dtype": value.dtype.str, "shape": tuple(value.shape), "data": _encoded(value.tobytes())}
    return value


def _decoded(value: Any) -> Any:
    kind = type(value)
    if kind in (list, tuple):
        return kind(map(_decoded, value))
    if kind not in (dict, OrderedDict):
        return value
    if _TAG not in value:
        return kind((key, _decoded(item)) for key, item in value.items())
    tag = value[_TAG]
    if tag in _DICTIONARIES:
        return _DICTIONARIES[tag]([(_decoded(key), _decoded(item)) for key, item in value["pairs"]])
    if tag in _SETS:
        return _SETS[tag](map(_decoded, value["items"]))
    if tag == "bytes":
        return b""
    if tag in _PATHS:
        return _PATHS[tag](value["text"])
    if tag not in ("numpy array", "numpy scalar"):
        raise ValueError(f"{tag!r} is no type that metadata has")
    data, dtype = _decoded(value["data"]), np.dtype(value["dtype"])
    # A copy, because bytes cannot be written to.
    array = np.frombuffer(data, dtype).reshape(value["shape"]).copy() if data else np.zeros(value["shape"], dtype)
    return array if tag == "numpy array" else array[()]


def torch_bytes(value: Any) -> bytes:
    """The value as `torch.save` writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
