"""Folders that a run will write logs and checkpoints into, looked at before a process is started.

Loggers make their folders at the first value that is logged, on the first rank alone, while the others wait for it.
"""

import os
import tempfile
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron.checkpoint.folder import is_remote


def unwritable_faults(trainer: pl.Trainer) -> list[str]:
    """Errors of loggers and ModelCheckpoints whose folder cannot be written, one sentence each; the first rank's."""
    if not trainer.is_global_zero:
        # Folders of another machine's own disk may be nowhere here.
        return []
    folders: dict[str, str | Path | None] = {
        f"save_dir ({one.save_dir}) of {type(one).__name__}": one.save_dir for one in trainer.loggers
    }
    for callback in trainer.checkpoint_callbacks:
        if not trainer.loggers:
            folders[f"default_root_dir ({trainer.default_root_dir}) of the Trainer"] = trainer.default_root_dir
        if isinstance(callback, ModelCheckpoint):
            folders[f"dirpath ({callback.dirpath}) of {type(callback).__name__}"] = callback.dirpath
    return [
        f"{name} cannot be written: {why}; name another folder"
        for name, folder in folders.items()
        if folder is not None and not is_remote(folder) and (why := why_unwritable(Path(folder)))
    ]


def why_unwritable(folder: Path) -> str:
    """Why no file can be made in a folder, or the folder itself not; empty where it can. Leaves nothing behind."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(one))
    try:
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        return f"{there}: {error.strerror or error}"
