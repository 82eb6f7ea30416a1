"""The checkpoint that `ckpt_path="last"` is: the newest complete one by its step; others are named in a message.

Lightning takes whatever is called `last*.ckpt` and was changed last. Before it looks, links are put right; and where it
would take a directory that is no complete checkpoint, or an older one, it is given the path of the newest.
"""

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_megatron.checkpoint.checkpoint_directory import STEP, StoredCheckpoint, checkpoint_at, scan_directory
from lightning_megatron.checkpoint.folder import Address, Folder, is_remote
from lightning_megatron.checkpoint.manifest import MANIFEST_FILE, read_manifest, read_meta
from lightning_megatron.checkpoint.repair import bring_back, repair
from lightning_megatron.checkpoint.torch_index import OPTIMIZERS
from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.trainer.checkpointing.run_history import fits_of, goes_on_from
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.setup.checks import is_named_checkpoint

_LAST = "last"


def prepared(trainer: pl.Trainer, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of fit, validate, test or predict, after their checkpoints were put in order.

    Raises ConfigurationError where all candidates for "last" are damaged, and where they cannot be read now.
    """
    for argument in arguments:
        if isinstance(argument, (str, Path)) and not is_named_checkpoint(str(argument)) and not is_remote(argument):
            _warn(bring_back(Path(argument).parent))
    if not any(isinstance(argument, str) and argument == _LAST for argument in arguments):
        return arguments
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    folders = {callback: _folder_of(callback, trainer) for callback in callbacks}
    on_exception = [
        _address(callback.ckpt_path)
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, OnExceptionCheckpoint)
    ]
    with _reporting_unreadable(*folders.values(), *on_exception):
        for folder in dict.fromkeys(folders.values()):
            repairs = repair(folder)
            _warn(repairs.done)
            if repairs.unfinished:
                names = ", ".join(map(str, repairs.unfinished))
                # Only where there are locks does a save know that no one writes there.
                or_else = "" if is_remote(folder) else f", or the next save into {folder}"
                rank_zero_warn(
                    f"the save of {names} ended before it was complete and is left out; "
                    f"`lightning-megatron checkpoint prune`{or_else} removes its files"
                )
        for path in on_exception:
            _warn([] if is_remote(path) else bring_back(Path(path).parent))
        last = _replacement_of_last(folders, [path for path in on_exception if Folder(path).kind() != "nothing"])
    if last is None:
        return arguments
    return tuple(os.fspath(last) if isinstance(one, str) and one == _LAST else one for one in arguments)


def require_alike(path: str | None, world: Axis) -> None:
    """Raises ConfigurationError, on all ranks, where some have found a checkpoint to load and others none. Collective.

    Each rank looks before it knows of the others. That their paths differ does no harm: the first rank's counts.
    """
    num_without = int(collectives.all_reduce(torch.tensor(int(path is None)), world))
    if num_without in (0, world.size):
        return
    paths = collectives.gather_objects(path, world)
    without = [str(rank) for rank, one in enumerate(paths) if one is None]
    found = next(f"{one} (rank {rank})" for rank, one in enumerate(paths) if one is not None)
    raise ConfigurationError(
        f"ckpt_path leads to {found}, but to nothing on ranks {', '.join(without)}; all ranks go on from one "
        "checkpoint: have its folder the same on all machines, or start the run again where it came just then"
    )


@contextmanager
def _reporting_unreadable(*addresses: Address) -> Iterator[None]:
    """Raises ConfigurationError where the file system fails inside the block: a checkpoint that cannot be read now is
    neither damaged nor missing, and to go on from an older one would lose what was trained since."""
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        # Remote file systems have errors of their own.
        where = ", ".join(dict.fromkeys(map(str, addresses)))
        raise ConfigurationError(
            f'ckpt_path="last" is not known, for what is at {where} cannot be read now '
            f"({type(error).__name__}: {error}); start the run again when it can, or give the path of a checkpoint"
        ) from error


def _replacement_of_last(folders: dict[ModelCheckpoint, Address], on_exception: list[Address]) -> Address | None:
    """The checkpoint to take instead of Lightning's choice; None where that is sound and the newest.

    At a remote address Lightning finds none, and loses the address.
    """
    candidates = {path for callback, folder in folders.items() for path in _named_last(callback, folder)}
    candidates |= set(on_exception)
    damaged = {path: fault for path in candidates if (fault := _fault(path))}
    # Names decide where file systems tell no times: every rank finds the same.
    sound = sorted(candidates - damaged.keys(), key=lambda path: (_changed_seconds(path), str(path)))
    newest = _newest(list(dict.fromkeys(folders.values())), on_exception)
    if not candidates:
        # Lightning takes a link away before it makes the next one: a run that was killed in between has none.
        if newest is None or not any(callback.save_last for callback in folders):
            return None
        rank_zero_warn(f'ckpt_path="last" is {newest.path}, the newest: there is none of that name')
        return newest.path
    if newest is None and not sound:
        raise ConfigurationError(
            f'ckpt_path="last" finds no complete checkpoint: {"; ".join(damaged.values())}; '
            f"remove {', '.join(sorted(map(str, damaged)))} to start anew, or give the path of a checkpoint"
        )
    path, older = (sound[-1], "") if sound else (None, "")
    if newest is not None and (path is None or (older := _older(path, newest))):
        path = newest.path
    if damaged:
        faults = "; ".join(damaged.values())
        rank_zero_warn(f'ckpt_path="last" is {path}: something else of that name is not complete: {faults}')
    elif older:
        rank_zero_info(f'ckpt_path="last" is {path}, the newest: {older}')
    elif not any(map(is_remote, candidates)):
        return None
    return path


def _newest(folders: list[Address], more: list[Address]) -> StoredCheckpoint | None:
    """The complete checkpoint of the most steps, in the folders or among `more`, without those that a later run did not
    go on from."""
    complete = [one for folder in folders for one in scan_directory(folder).complete]
    complete += [one for one in map(checkpoint_at, more) if one.is_complete]
    fits = {one.path: fits_of(read_meta(one.path)) for one in complete}

    def is_superseded(one: StoredCheckpoint) -> bool:
        return any(
            other.saved_seconds > one.saved_seconds
            and bool(fits[one.path] and fits[other.path])
            and not goes_on_from(fits[other.path], fits[one.path], one.step)
            and not goes_on_from(fits[one.path], fits[other.path], other.step)
            for other in complete
        )

    current = [one for one in complete if not is_superseded(one)]
    return max(current, key=lambda one: (one.step, one.saved_seconds), default=None)


def _older(path: Address, newest: StoredCheckpoint) -> str:
    """Message that the checkpoint at the path is older than the newest; empty where it is not, or is a file."""
    if os.path.isfile(path):
        return ""
    ours, theirs = read_meta(path), read_meta(newest.path)
    # What has weights alone is nothing to go on from.
    if newest.step <= ours.get(STEP, -1) or (OPTIMIZERS in ours and OPTIMIZERS not in theirs):
        return ""
    return f"it is of step {newest.step}, and {path} of step {ours.get(STEP, -1)}"


def _named_last(callback: ModelCheckpoint, folder: Address) -> Iterable[Address]:
    """Checkpoints that Lightning would choose from: it goes by names alone."""
    pattern = f"{callback.CHECKPOINT_NAME_LAST}*{callback.FILE_EXTENSION}"
    if is_remote(folder):
        return [one.path for one in scan_directory(folder).checkpoints if fnmatch(one.name, pattern)]
    return [path for path in Path(folder).glob(pattern) if path.exists() and path.suffix == callback.FILE_EXTENSION]


def _changed_seconds(path: Address) -> float:
    """Time of the last change at the path, in seconds since 1970."""
    return Folder(path).changed_seconds(MANIFEST_FILE) if is_remote(path) else os.stat(path).st_mtime


def _fault(path: Address) -> str:
    """Why the directory is no complete checkpoint; nothing for one that is, and for a file, which Lightning wrote."""
    if os.path.isfile(path):
        return ""
    try:
        read_manifest(path)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return ""


def _folder_of(callback: ModelCheckpoint, trainer: pl.Trainer) -> Address:
    """Folder that the callback saves into.

    It knows by itself only after its set-up. Until then it is as Lightning's documentation says: `checkpoints` in the
    folder of the first logger's version or, without loggers, in the root folder.
    """
    if callback.dirpath is not None:
        return _address(callback.dirpath)
    if not trainer.loggers:
        return _address(os.path.join(trainer.default_root_dir, "checkpoints"))
    logger = trainer.loggers[0]
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    root = logger.save_dir if logger.save_dir is not None else trainer.default_root_dir
    return _address(os.path.join(root, str(logger.name), version, "checkpoints"))


def _address(folder: Address) -> Address:
    return os.fspath(folder) if is_remote(folder) else Path(folder)


def _warn(done: Iterable[str]) -> None:
    # The rank that repaired something warns, not the first rank alone.
    for sentence in done:
        warnings.warn(sentence, stacklevel=2)
