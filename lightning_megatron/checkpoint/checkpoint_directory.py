"""What a folder of checkpoints holds: complete ones, damaged ones, links to them, and what interrupted saves left.

step=3.ckpt/                      a checkpoint
last.ckpt -> step=3.ckpt          a link to one
.unfinished/{id}/step=6.ckpt/     a save that has not ended, or what it replaced and did not come to remove
.replaced/{id}/step=3.ckpt/       set aside while another takes its place, where names cannot be exchanged
.removed/{id}/step=1.ckpt/        on its way out

Behind an address there are neither links nor hidden directories: a save that has not ended is a directory without a
manifest, at its final place.
"""

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.checkpoint.atomic_directory import REMOVED, REPLACED, UNFINISHED, is_unfinished_name
from lightning_megatron.checkpoint.folder import Address, Folder, is_remote, name_at
from lightning_megatron.checkpoint.manifest import MANIFEST_FILE, is_checkpoint, read_manifest, read_meta

SUFFIX = ".ckpt"
# Of the metadata that Lightning saves.
STEP, EPOCH = "global_step", "epoch"


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """A directory that is a checkpoint, or by its name should be one."""

    path: Address
    fault: str = ""
    """Why it cannot be read; empty: it is complete."""
    step: int = -1
    """Optimizer steps before it was saved; -1 where it does not say."""
    epoch: int = -1
    saved_seconds: float = 0.0
    """When its manifest was written, in seconds since 1970."""
    num_bytes: int = 0

    @property
    def name(self) -> str:
        return name_at(self.path)

    @property
    def is_complete(self) -> bool:
        """All its files are there, in the sizes that they were written with."""
        return not self.fault


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """What a save or a removal left behind when it was interrupted, or has not come to the end of yet."""

    path: Address
    what: str
    # UNFINISHED, REPLACED or REMOVED
    final_path: Address
    """Where it was to stand, or stood."""
    touched_seconds: float
    """When anything of it was last changed, in seconds since 1970; 0 where its file system does not tell."""
    num_bytes: int
    files: tuple[str, ...] = ()
    """Behind an address: those that it had."""

    @property
    def name(self) -> str:
        """That of its place."""
        return name_at(self.final_path)

    @property
    def is_unfinished(self) -> bool:
        """Whether it is a save that has not come to its end; else it is an old checkpoint on its way out."""
        if self.what != UNFINISHED:
            return False
        # After an exchange of names the old checkpoint, of another save, lies where the draft lay.
        try:
            return not is_checkpoint(self.path) or read_manifest(self.path).save_id == Path(self.path).parent.name
        except (ValueError, OSError):
            return True


@dataclass(frozen=True, kw_only=True)
class CheckpointDirectory:
    """All of a folder."""

    checkpoints: tuple[StoredCheckpoint, ...]
    """Oldest first, by step and then by time; those that are not complete come before all that are."""
    leftovers: tuple[Leftover, ...]
    links: tuple[Path, ...]
    """Whose names are those of checkpoints, or that lead to one."""

    @property
    def complete(self) -> tuple[StoredCheckpoint, ...]:
        """The checkpoints that can be loaded, the newest last."""
        return tuple(standing for standing in self.checkpoints if standing.is_complete)


def scan_directory(folder: Address) -> CheckpointDirectory:
    """What the folder holds now; nothing where there is no folder. What vanishes meanwhile is left out.

    Raises OSError where something there cannot be read now: whether it is complete is not known then. A remote file
    system may raise errors of its own.
    """
    checkpoints = [checkpoint_at(path) for path in _standing_in(folder)]
    # Of one that is not complete step and time are not known: the least.
    checkpoints.sort(key=lambda one: (one.step, one.saved_seconds, one.name))
    return CheckpointDirectory(
        checkpoints=tuple(checkpoints), leftovers=tuple(leftovers_of(folder)), links=tuple(links_of(folder))
    )


def links_of(folder: Address) -> list[Path]:
    """The links of the folder, as `CheckpointDirectory.links`."""
    return [] if is_remote(folder) else [path for path in _named(Path(folder)) if path.is_symlink()]


def _standing_in(folder: Address) -> list[Address]:
    if is_remote(folder):
        return [
            path
            for path, sizes in _sizes_behind(folder).items()
            if MANIFEST_FILE in sizes or (path.endswith(SUFFIX) and not _is_unfinished(sizes))
        ]
    return [path for path in _named(Path(folder)) if not path.is_symlink()]


def _sizes_behind(address: Address) -> dict[str, dict[str, int]]:
    """Bytes of each file in each directory behind an address."""
    folder, found = Folder(address), {}
    for name in folder.folders() if folder.kind() == "folder" else []:
        path = f"{folder.path.rstrip('/')}/{name}"
        with contextlib.suppress(FileNotFoundError):
            found[path] = Folder(path).sizes()
    return found


def _named(folder: Path) -> list[Path]:
    """What is a checkpoint, or a link to one, or by its name should be; not files, which Lightning writes."""
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return [
        path
        for path in found
        if not path.name.startswith(".") and not path.is_file() and (path.suffix == SUFFIX or is_checkpoint(path))
    ]


def leads_to(link: Address) -> Path:
    """Where the link leads at last, whether anything is there or not."""
    return Path(os.path.realpath(link))


def checkpoint_at(path: Address) -> StoredCheckpoint:
    """The checkpoint at the path, or why there is none. Raises as `scan_directory`."""
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
    """What interrupted saves left in the folder."""
    if is_remote(folder):
        return _unfinished_behind(folder)
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
    """Whether a directory behind an address is a save without a manifest: no files but those named as a save's are."""
    return bool(sizes) and all(map(is_unfinished_name, sizes))


def _unfinished_behind(address: Address) -> list[Leftover]:
    found = []
    for path, sizes in _sizes_behind(address).items():
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
    """The hidden neighbours of the folder's checkpoints, of one kind."""
    return [path for of_a_save in _inside(folder / what) for path in _inside(of_a_save)]


def _inside(path: Path) -> list[Path]:
    # Not glob: that fails where a directory vanishes under it.
    try:
        return sorted(path.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _last_touched(path: Path) -> tuple[float, int]:
    """When anything in it was last changed, and the bytes of its files."""
    touched_seconds, num_bytes = 0.0, 0
    for one in (path, *(Path(parent) / name for parent, _, names in os.walk(path) for name in names)):
        try:
            status = one.lstat()
        except FileNotFoundError:
            # Whoever wrote it goes on, or removes it.
            continue
        touched_seconds = max(touched_seconds, status.st_mtime)
        num_bytes += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return touched_seconds, num_bytes


def _number(value: object) -> int:
    return value if isinstance(value, int) else -1
