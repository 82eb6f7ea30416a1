"""Folders of checkpoints as runs leave them, those that were killed among them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from lightning_megatron.checkpoint import save
from lightning_megatron.checkpoint.atomic_directory import AtomicDirectory, hidden, new_id
from lightning_megatron.mesh import Mesh

WORLD = Mesh.single().world


Where = TypeVar("Where", Path, str)


def saved(path: Where, step: int = 0, *, meta: Mapping[str, Any] | None = None, **pieces: torch.Tensor) -> Where:
    """A small complete checkpoint of that step."""
    metadata = {"global_step": step, "epoch": step // 4, **(meta or {})}
    save(path, {"w": torch.full((100,), float(step)), **pieces}, metadata, world=WORLD)
    return path


def begun(address: str) -> str:
    """A save at an address that did not come to its manifest."""
    draft = AtomicDirectory.start(address, new_id())
    with draft.create(draft.name_of("__0_0.distcp")) as stream:
        stream.write(b"half")
    return address


def left(path: Path, what: str, save_id: str, *, is_complete: bool, age_seconds: float = 0.0) -> Path:
    """What is left of a save, or of what it replaced, in the directory of `path`."""
    aside = hidden(path, what, save_id)
    aside.parent.mkdir(parents=True)
    if is_complete:
        saved(aside, 7)
    else:
        aside.mkdir()
        (aside / "__0_0.distcp").write_bytes(b"half")
    for one in (*aside.iterdir(), aside):
        moment = one.stat().st_mtime - age_seconds
        os.utime(one, (moment, moment))
    return aside
