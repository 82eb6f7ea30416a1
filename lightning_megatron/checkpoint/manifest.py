"""What a checkpoint directory holds, told without reading its tensors.

    .metadata           names, global shapes, dtypes, and which file holds which box
    __{rank}_0.distcp   the tensors that a rank wrote
    meta.pt             plain data: what the caller saves beside the tensors, and this package's stamp

The first two are as torch.distributed.checkpoint writes them.
"""

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

TENSORS_FILE = ".metadata"
META_FILE = "meta.pt"
# Key in the metadata of a checkpoint, and the version of this layout: a reader refuses one that is newer.
STAMP = "lightning_megatron"
LAYOUT_VERSION = 1

_PLAIN = (type(None), bool, int, float, complex, str, bytes, Tensor, nn.Parameter)


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint: its shape in the unsplit model and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether there is a complete checkpoint directory at the path."""
    return all(Path(path, name).is_file() for name in (TENSORS_FILE, META_FILE))


def read_meta(path: str | os.PathLike[str], *, weights_only: bool = True) -> dict[str, Any]:
    """The metadata that the checkpoint was saved with, and this package's stamp under the key `lightning_megatron`.

    `weights_only=False` runs code that the file may hold. Raises ValueError when the path is no checkpoint.
    """
    _require_checkpoint(path)
    try:
        meta = torch.load(Path(path, META_FILE), map_location="cpu", weights_only=weights_only)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise ValueError(
            f"{META_FILE} of checkpoint {path} cannot be read as plain data, is it damaged? {error}\n"
            "If it is whole and you trust where it comes from, weights_only=False reads it"
        ) from error
    stamp = meta.get(STAMP) if isinstance(meta, dict) else None
    if not isinstance(stamp, dict):
        raise ValueError(f"checkpoint {path} was not written by lightning_megatron: its {META_FILE} has no {STAMP!r}")
    if stamp["layout"] > LAYOUT_VERSION:
        raise ValueError(
            f"checkpoint {path} has layout {stamp['layout']}, written by lightning_megatron {stamp['package']}; this "
            f"version reads layouts up to {LAYOUT_VERSION}: install that version or a newer one"
        )
    return dict(meta)


def read_entries(path: str | os.PathLike[str]) -> dict[str, Entry]:
    """Shape and dtype of every tensor in the checkpoint. Raises ValueError when the path is no checkpoint."""
    _require_checkpoint(path)
    try:
        tensors = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # whatever a damaged pickle runs into
        raise ValueError(f"{TENSORS_FILE} of checkpoint {path} cannot be read, is it damaged? {error!r}") from error
    return {
        name: Entry(tuple(found.size), found.properties.dtype)
        for name, found in tensors.items()
        if isinstance(found, TensorStorageMetadata)
    }


def read_names(path: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Global shape of every tensor in the checkpoint. Raises ValueError when the path is no checkpoint."""
    return {name: entry.shape for name, entry in read_entries(path).items()}


def meta_bytes(meta: Mapping[str, Any]) -> bytes:
    """The content of the metadata file. Raises ValueError naming every value that is not plain data."""
    if faults := list(_not_plain(dict(meta), "meta")):
        more = f"\nand {len(faults) - 20} more" if len(faults) > 20 else ""
        raise ValueError(
            "a checkpoint's metadata is plain data (containers, numbers, strings, tensors), so that reading it runs "
            "no code; not plain:\n" + "\n".join(faults[:20]) + more
        )
    stamp = {"layout": LAYOUT_VERSION, "package": _package_version(), "torch": str(torch.__version__)}
    return _saved({**meta, STAMP: stamp})


def _require_checkpoint(path: str | os.PathLike[str]) -> None:
    """Raises ValueError that says what is at the path instead of a checkpoint."""
    if is_checkpoint(path):
        return
    place = Path(path)
    expected = f"a checkpoint is a directory that holds {TENSORS_FILE} and {META_FILE}"
    if place.is_file():
        raise ValueError(f"checkpoint {path} is a plain file, but {expected}; was it saved by another strategy?")
    if not place.is_dir():
        raise ValueError(f"checkpoint {path} does not exist; {expected}")
    found = sorted(entry.name for entry in place.iterdir())
    if not found:
        raise ValueError(f"checkpoint {path} is an empty directory; {expected}")
    missing = " and ".join(name for name in (TENSORS_FILE, META_FILE) if name not in found)
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    raise ValueError(f"checkpoint {path} has no {missing} among {', '.join(found[:5])}{more}; {expected}")


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
            torch.load(io.BytesIO(_saved(value)), weights_only=True)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            yield f"  {where} is a {type(value).__module__}.{type(value).__qualname__} ({reason[:80]})"


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _package_version() -> str:
    try:
        return metadata.version("lightning-megatron")
    except metadata.PackageNotFoundError:
        return "not installed"
