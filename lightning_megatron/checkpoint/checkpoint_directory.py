"""The contents of a directory of checkpoints: complete ones, damaged ones, links, and leftovers of interrupted saves.

step=3.ckpt/                      a checkpoint
last.ckpt -> step=3.ckpt          a link to one
.unfinished/{id}/step=6.ckpt/     an unfinished save, or what a save replaced and has not removed yet
.replaced/{id}/step=3.ckpt/       set aside while another takes its place, where names cannot be exchanged
.removed/{id}/step=1.ckpt/        being removed

At an address there are neither links nor hidden directories: an unfinished save is a directory without a manifest, at
its final path.
"""

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.checkpoint.atomic_directory import REMOVED, REPLACED, UNFINISHED, is_unfinished_name
from lightning_megatron.checkpoint.folder import Address, Folder, is_remote, name_at, paths_in
from lightning_megatron.checkpoint.manifest import MANIFEST_FILE, SUFFIX, is_checkpoint, read_manifest, read_meta

# Keys of the metadata that Lightning saves.
STEP, EPOCH = "global_step", "epoch"


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """A directory that is a checkpoint, or should be one by its name."""

    path: Address
    fault: str = ""
    """Reason why it cannot be read; empty: it is complete."""
    step: int = -1
    """Optimizer steps before it was saved; -1 where the metadata has none."""
    epoch: int = -1
    """Epoch in which it was saved; -1 where the metadata has none."""
    saved_seconds: float = 0.0
    """Time at which its manifest was written, in seconds since 1970."""
    num_bytes: int = 0
    """Bytes of all its files."""

    @property
    def name(self) -> str:
        return name_at(self.path)

    @property
    def is_complete(self) -> bool:
        """Whether all its files are there, in the sizes that they were written with."""
        return not self.fault


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """Files of an interrupted save or removal, or of one that still runs."""

    path: Address
    what: str
    """One of UNFINISHED, REPLACED and REMOVED."""
    final_path: Address
    """Path that the checkpoint was to have, or had."""
    touched_seconds: float
    """Time of the last change, in seconds since 1970; 0 where the file system does not tell."""
    num_bytes: int
    """Bytes of all its files."""
    files: tuple[str, ...] = ()
    """Names of its files, at an address."""

    @property
    def name(self) -> str:
        """Name of the checkpoint."""
        return name_at(self.final_path)

    @property
    def is_unfinished(self) -> bool:
        """Whether it is an unfinished save; else it is an old checkpoint that is being removed."""
        if self.what != UNFINISHED:
            return False
        # After an exchange of names the old checkpoint, of another save, lies where the unfinished one lay.
        try:
            return not is_checkpoint(self.path) or read_manifest(self.path).save_id == Path(self.path).parent.name
        except (ValueError, OSError):
            return True


@dataclass(frozen=True, kw_only=True)
class CheckpointDirectory:
    """The contents of a directory of checkpoints."""

    checkpoints: tuple[StoredCheckpoint, ...]
    """Checkpoints, oldest first by step and then by time; incomplete ones come first."""
    leftovers: tuple[Leftover, ...]
    """Leftovers of interrupted saves and removals."""
    links: tuple[Path, ...]
    """Links that have a checkpoint's name or lead to one."""

    @property
    def complete(self) -> tuple[StoredCheckpoint, ...]:
        """Checkpoints that can be loaded, the newest last."""
        return tuple(standing for standing in self.checkpoints if standing.is_complete)


def scan_directory(folder: Address) -> CheckpointDirectory:
    """Scans a directory of checkpoints; a missing one is empty, and what vanishes meanwhile is left out.

    Raises OSError where something in it cannot be read now, because then it is unknown whether that is complete. A
    remote file system may raise errors of its own.
    """
    checkpoints = [checkpoint_at(path) for path in _checkpoint_paths(folder)]
    # Incomplete ones, whose step and time are unknown, come first.
    checkpoints.sort(key=lambda one: (one.step, one.saved_seconds, one.name))
    return CheckpointDirectory(
        checkpoints=tuple(checkpoints), leftovers=tuple(leftovers_of(folder)), links=tuple(links_of(folder))
    )


def links_of(folder: Address) -> list[Path]:
    """Links of the directory, as `CheckpointDirectory.links`."""
    return [] if is_remote(folder) else [path for path in _named(Path(folder)) if path.is_symlink()]


def _checkpoint_paths(folder: Address) -> list[Address]:
    if is_remote(folder):
        return [
            path
            for path, sizes in _remote_sizes(folder).items()
            if MANIFEST_FILE in sizes or (path.endswith(SUFFIX) and not _is_unfinished(sizes))
        ]
    return [path for path in _named(Path(folder)) if not path.is_symlink()]


def _remote_sizes(address: Address) -> dict[str, dict[str, int]]:
    """Bytes of each file in each directory at an address, by path."""
    folder, found = Folder(address), {}
    for name in folder.folders() if folder.kind() == "folder" else []:
        path = f"{folder.path.rstrip('/')}/{name}"
        with contextlib.suppress(FileNotFoundError):
            found[path] = Folder(path).sizes()
    return found


def _named(folder: Path) -> list[Path]:
    """Paths that are checkpoints, links to them, or should be by their names; no files, which Lightning writes."""
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return [
        path
        for path in found
        if not path.name.startswith(".") and not path.is_file() and (path.suffix == SUFFIX or is_checkpoint(path))
    ]


def leads_to(link: Address) -> Path:
    """The final target of a link, whether anything is there or not."""
    return Path(os.path.realpath(link))


def checkpoint_at(path: Address) -> StoredCheckpoint:
    """The checkpoint at the path, complete or with its fault. Raises as `scan_directory`."""
    try:
        manifest, meta = read_manifest(path), read_meta(path)
        saved_seconds = Folder(path).changed_seconds(MANIFEST_FILE)
    except (ValueError, FileNotFoundError) as error:
        return StoredCheckpoint(path=path, fault=str(error))
    return StoredCheckpoint(
        path=path,
        step=_number(meta.get(STEP)),
        epoch=_number(meta.get(EPOCH)),
        saved_seconds=saved_seconds,
        num_bytes=sum(manifest.files.values()),
    )


def leftovers_of(folder: Address) -> list[Leftover]:
    """Leftovers of interrupted saves and removals in the directory."""
    if is_remote(folder):
        return _remote_unfinished(folder)
    folder, found = Path(folder), []
    for what in (UNFINISHED, REPLACED, REMOVED):
        for path in hidden_in(folder, what):
            touched_seconds, num_bytes = _last_touched(path)
            found.append(
                Leftover(
                    path=path,
                    what=what,
                    final_path=folder / path.name,
                    touched_seconds=touched_seconds,
                    num_bytes=num_bytes,
                )
            )
    return found


def _is_unfinished(sizes: dict[str, int]) -> bool:
    """Whether a directory at an address is an unfinished save: it has only files named by a save."""
    return bool(sizes) and all(map(is_unfinished_name, sizes))


def _remote_unfinished(address: Address) -> list[Leftover]:
    found = []
    for path, sizes in _remote_sizes(address).items():
        if not _is_unfinished(sizes):
            continue
        with contextlib.suppress(FileNotFoundError):
            found.append(
                Leftover(
                    path=path,
                    what=UNFINISHED,
                    final_path=path,
                    touched_seconds=max(map(Folder(path).changed_seconds, sizes)),
                    num_bytes=sum(sizes.values()),
                    files=tuple(sizes),
                )
            )
    return found


def hidden_in(folder: Path, what: str) -> list[Path]:
    """Hidden directories of one kind next to the checkpoints of the directory."""
    return [path for of_a_save in paths_in(folder / what) for path in paths_in(of_a_save)]


def _last_touched(path: Path) -> tuple[float, int]:
    """Time of the last change in a directory, and bytes of its files."""
    touched_seconds, num_bytes = 0.0, 0
    for one in (path, *(Path(parent) / name for parent, _, names in os.walk(path) for name in names)):
        try:
            status = one.lstat()
        except FileNotFoundError:
            # The writing process has renamed or removed it.
            continue
        touched_seconds = max(touched_seconds, status.st_mtime)
        num_bytes += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return touched_seconds, num_bytes


def _number(value: object) -> int:
    return value if isinstance(value, int) else -1
