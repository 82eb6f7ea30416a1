"""The folders that a run's ModelCheckpoints save into: each is of one live run at a time."""

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron.checkpoint.folder import is_remote
from lightning_megatron.checkpoint.owner_lock import FolderInUseError, FolderOwner
from lightning_megatron.comm.collectives import broadcast_object
from lightning_megatron.mesh import Axis
from lightning_megatron.trainer.config import ConfigurationError


def take_folders(trainer: pl.Trainer, world: Axis) -> list[FolderOwner]:
    """Ownership of the folders, on the first rank. Collective.

    Raises ConfigurationError, on all ranks, where another run that lives saves into one of them.
    """
    owners: list[FolderOwner] = []
    faults: list[str] = []
    if world.is_first:
        for folder in _folders(trainer):
            try:
                owner = FolderOwner.take(folder)
            except FolderInUseError as error:
                faults.append(str(error))
                continue
            owners += [owner] if owner is not None else []
    if faults := broadcast_object(faults, world):
        for owner in owners:
            owner.release()
        raise ConfigurationError(faults)
    return owners


def _folders(trainer: pl.Trainer) -> list[Path]:
    """Folders of the callbacks, known once they are set up; at an address there are no locks."""
    folders = [
        callback.dirpath
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint) and (callback.save_top_k != 0 or callback.save_last)
    ]
    return [Path(folder) for folder in dict.fromkeys(folders) if folder and not is_remote(folder)]
