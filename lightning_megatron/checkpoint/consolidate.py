"""Consolidation of a checkpoint into one dictionary of unsharded tensors, as Lightning saves on one device.

An optimizer's states are numbered as in `Optimizer.state_dict()`, by parameter over all groups.
The numbers follow the order in which the unsplit module has its parameters, and so fit optimizers whose groups take
them in that order, as `module.parameters()` gives them.
"""

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoint.atomic_directory import (
    UNFINISHED,
    hidden,
    make_locked,
    new_id,
    remove_interrupted_in,
    replace,
    require_replaceable,
    tidy,
)
from lightning_megatron.checkpoint.folder import Address
from lightning_megatron.checkpoint.load import load
from lightning_megatron.checkpoint.manifest import read_entries
from lightning_megatron.checkpoint.state import OTHER_STATES, is_module_name, other_state_of, split_optimizer_name
from lightning_megatron.checkpoint.summary import OWN_KEYS, read_own_meta
from lightning_megatron.checkpoint.torch_index import OPTIMIZERS
from lightning_megatron.host_memory import machine_memory_bytes
from lightning_megatron.mesh import Mesh

# Keys of Lightning's dictionary.
_WEIGHTS, _OPTIMIZERS = "state_dict", "optimizer_states"
# Keys that Lightning leaves out of a checkpoint of weights alone.
_OF_TRAINING = ("lr_schedulers", "callbacks")
_GIB = 2**30


def consolidate(path: Address, *, weights_only: bool = False) -> dict[str, Any]:
    """Lightning's dictionary with all tensors unsharded, in as much host memory as the checkpoint has bytes.

    With `weights_only` no optimizer states are read. Raises ValueError where the path is no checkpoint, RuntimeError
    where it is damaged.
    """
    entries, meta = read_entries(path), read_own_meta(path)
    if weights_only:
        entries = {name: entry for name, entry in entries.items() if is_module_name(name)}
    tensors = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in entries.items()}
    load(path, tensors, world=Mesh.single().world, strict=True, among=entries.__contains__)
    if weights_only:
        meta = {key: value for key, value in meta.items() if key not in (OPTIMIZERS, *_OF_TRAINING)}
    return lightning_dictionary(meta, tensors)


def lightning_dictionary(meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Lightning's dictionary from a checkpoint's metadata and all its tensors, unsharded, by their names there."""
    checkpoint = {key: value for key, value in meta.items() if key not in OWN_KEYS}
    others = {key: dict[str, Tensor]() for key in meta.get(OTHER_STATES, ())}
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_module_name(name):
            key, own_name = other_state_of(name, others)
            (others[key] if key else weights)[own_name] = tensor
    checkpoint |= {_WEIGHTS: weights, **others}
    if OPTIMIZERS in meta:
        checkpoint[_OPTIMIZERS] = [
            _optimizer_state(index, rest, tensors) for index, rest in enumerate(meta[OPTIMIZERS])
        ]
    return checkpoint


def consolidated_stream(path: Address) -> io.BytesIO:
    """The file that `write_consolidated` writes, in memory, which takes twice the bytes of the checkpoint.

    Raises ValueError where the path is no checkpoint, is damaged, or needs more memory than there is.
    """
    needed = 2 * sum(entry.num_bytes for entry in read_entries(path).values())
    if needed > (memory := machine_memory_bytes()):
        raise ValueError(
            f"checkpoint {path} read as one file takes {needed / _GIB:,.1f} GiB of memory, twice its bytes, and this "
            f"machine has {memory / _GIB:,.1f} GiB; lightning_megatron.load_from_checkpoint reads the weights alone"
        )
    stream = io.BytesIO()
    try:
        torch.save(consolidate(path), stream)
    except (RuntimeError, MemoryError) as error:
        raise ValueError(f"checkpoint {path} cannot be read as one file: {type(error).__name__}: {error}") from error
    stream.seek(0)
    return stream


def write_consolidated(path: Address, out: Path, *, weights_only: bool = False) -> None:
    """Writes `consolidate` to a file, under another name until it is complete. Raises ValueError where `out` exists."""
    _require_free(out)
    checkpoint = consolidate(path, weights_only=weights_only)
    _require_free(out)
    write_file(out, checkpoint)


def write_file(path: Address, checkpoint: Mapping[str, Any]) -> None:
    """Writes a dictionary with `torch.save`; the file is at its path in one step, complete and flushed to the disk.

    What was there is replaced, a checkpoint directory too. Raises OSError, and ValueError where a directory with
    something else is there; then that is still there.
    """
    require_replaceable(path)
    final = Path(os.path.abspath(path))
    save_id = new_id()
    partial = hidden(final, UNFINISHED, save_id)
    lock = make_locked(partial.parent)
    try:
        with open(partial, "xb") as stream:
            torch.save(dict(checkpoint), stream)
            stream.flush()
            os.fsync(stream.fileno())
        replace(partial, final, save_id)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        lock.release()
        tidy(partial)
    remove_interrupted_in(final.parent)


def _require_free(out: Path) -> None:
    if os.path.lexists(out):
        raise ValueError(f"{out} exists and is not overwritten; remove it, or give another path")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out} lies in {out.parent}, which is no directory; make it, or give another path")


def _optimizer_state(index: int, rest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The optimizer's state dictionary; a parameter that has no state gets none."""
    states: dict[str, dict[str, Any]] = {name: dict(values) for name, values in rest["state"].items()}
    for flat, tensor in tensors.items():
        parts = split_optimizer_name(flat)
        if parts is not None and parts[0] == index:
            states.setdefault(parts[1], {})[parts[2]] = tensor
    numbers: dict[str, int] = {}
    groups = []
    for group in rest["groups"]:
        for name in group["params"]:
            numbers[name] = len(numbers)
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    by_number = {number: states[name] for name, number in numbers.items() if name in states}
    return {"state": by_number, "param_groups": groups}
