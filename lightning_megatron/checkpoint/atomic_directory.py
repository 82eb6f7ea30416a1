"""Atomic writing of checkpoints: files become one by one atomic step, and nobody takes them for one before that.

On a mounted file system they are in a hidden directory next to the final path, and the step is a rename, after every
file and the directory have been flushed to the disk. If another checkpoint is at the final path, the two exchange
names in that one step. At an address (an object store has no renames) the files are at the final path, under names
that begin with the save's id, and the step is to write the manifest. No failure after that step undoes it: old files
that were not removed then are no part of the new checkpoint, and the next save there removes them.
"""

import contextlib
import ctypes
import errno
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from dataclasses import replace as replace_field
from pathlib import Path
from typing import IO, Any, cast

import fsspec

from lightning_megatron.checkpoint.folder import Address, Folder, is_remote, system_of
from lightning_megatron.checkpoint.manifest import MANIFEST_FILE, is_checkpoint, read_stored_manifest
from lightning_megatron.checkpoint.owner_lock import SaveLock, remove_interrupted

# Hidden directories are `.{what}/{save's id}/{name of the checkpoint}`, next to the checkpoint.
UNFINISHED, REPLACED, REMOVED = ".unfinished", ".replaced", ".removed"
_AT_WORKING_DIRECTORY, _EXCHANGE = -100, 2


@dataclass(frozen=True)
class AtomicDirectory:
    """The unfinished directory of a save, to which every rank writes its files."""

    path: str
    save_id: str
    lock: SaveLock = field(default_factory=SaveLock, compare=False)
    """Lock that says that this process lives."""

    @staticmethod
    def start(path: Address, save_id: str) -> "AtomicDirectory":
        """Makes the directory. Raises ValueError where something else than a checkpoint is at the path."""
        draft = AtomicDirectory(os.fspath(path), save_id)
        require_replaceable(path)
        if is_remote(path):
            fs, root = system_of(path)
            fs.makedirs(root, exist_ok=True)
        else:
            made = [parent for parent in draft._final.parents if not parent.exists()]
            try:
                draft = replace_field(draft, lock=make_locked(draft._hidden.parent))
                draft._hidden.mkdir()
                for parent in made:
                    flush_directory(parent.parent)
            except OSError:
                draft.discard()
                raise
        return draft

    @property
    def _final(self) -> Path:
        # The parents may be links; only the name itself is replaced.
        return Path(os.path.abspath(self.path))

    @property
    def _hidden(self) -> Path:
        return hidden(self._final, UNFINISHED, self.save_id)

    def name_of(self, name: str) -> str:
        """The name under which a file is written."""
        return f"{self.save_id}-{name}" if is_remote(self.path) else name

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Creates a file and flushes it to the disk when the block ends."""
        if is_remote(self.path):
            with fsspec.open(f"{self.path.rstrip('/')}/{name}", "wb") as stream:
                yield cast(IO[bytes], stream)
            return
        with open(self._hidden / name, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    def link(self, name: str, other: "AtomicDirectory") -> None:
        """Links a file of the other, which is in place. Raises OSError where the file system has no links."""
        os.link(other._final / name, self._hidden / name)

    def drop(self, name: str) -> None:
        """Removes a file if it is there."""
        (self._hidden / name).unlink(missing_ok=True)

    def put_in_place(self, manifest: bytes) -> None:
        """Makes the files the checkpoint at the path. Raises OSError; then the old one is still there."""
        if is_remote(self.path):
            folder = Folder(self.path)
            outdated = [name for name in folder.sizes() if not name.startswith(self.save_id) and name != MANIFEST_FILE]
            with self.create(MANIFEST_FILE) as stream:
                stream.write(manifest)
            # Remote file systems have errors of their own.
            with contextlib.suppress(Exception):
                remove_files(self.path, outdated)
            return
        with self.create(MANIFEST_FILE) as stream:
            stream.write(manifest)
        flush_directory(self._hidden)
        replace(self._hidden, self._final, self.save_id)
        self.lock.release()
        tidy(self._hidden)
        remove_interrupted_in(self._final.parent)

    def discard(self) -> None:
        """Removes what was written, unless it is the checkpoint at the path by now.

        Raises nothing at an address, because the caller has an error to raise: what cannot be removed stays.
        """
        if not is_remote(self.path):
            shutil.rmtree(self._hidden, ignore_errors=True)
            self.lock.release()
            tidy(self._hidden)
            return
        with contextlib.suppress(Exception):
            if not self._is_in_place():
                remove_files(self.path, [name for name in Folder(self.path).sizes() if name.startswith(self.save_id)])

    def _is_in_place(self) -> bool:
        """Whether the checkpoint at the address is this one."""
        try:
            return read_stored_manifest(self.path).save_id == self.save_id
        except ValueError:
            return False


def hidden(path: Path, what: str, save_id: str) -> Path:
    """Path of the hidden directory next to a checkpoint."""
    return path.parent / what / save_id / path.name


def make_hidden(folder: Path) -> None:
    """Makes a hidden directory and its parents, which `tidy` of a save in flight may remove just then."""
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
            return
    folder.mkdir(parents=True, exist_ok=True)


def make_locked(folder: Path) -> SaveLock:
    """Makes the directory of one unfinished save and locks it; before that another process may take it for one left."""
    while True:
        make_hidden(folder)
        if (lock := SaveLock.of(folder)) is not None:
            return lock


def remove_interrupted_in(folder: Path) -> None:
    """Removes what saves and removals whose process has ended left next to the checkpoints of the folder."""
    for what in (UNFINISHED, REMOVED):
        remove_interrupted(folder / what)


def tidy(neighbour: Path) -> None:
    """Removes the parents of a hidden directory that is gone, unless they hold another."""
    for folder in (neighbour.parent, neighbour.parent.parent):
        with contextlib.suppress(OSError):
            folder.rmdir()


def replace(source: Path, path: Path, save_id: str) -> None:
    """Renames `source` to `path`, and removes after that what was there.

    It is one step where the file system can exchange two names. Else the old checkpoint is set aside first, under a
    name from which `repair` restores it if the machine stops just then.
    """
    # A link to a checkpoint elsewhere is replaced, not followed: hence lexists.
    aside = hidden(path, REPLACED, save_id)
    is_exchanged = os.path.lexists(path) and _exchange(source, path)
    try:
        if not is_exchanged:
            if os.path.lexists(path):
                make_hidden(aside.parent)
                os.rename(path, aside)
            os.rename(source, path)
        flush_directory(path.parent)
    except OSError:
        if is_exchanged:
            _exchange(source, path)
        else:
            _undo(source, path, aside)
        raise
    _delete(source if is_exchanged else aside)


def require_replaceable(path: Address) -> None:
    """Raises ValueError where the path is a directory that holds something else than a checkpoint."""
    folder = Folder(path)
    if folder.kind() == "folder" and not is_checkpoint(path) and _holds_something(folder):
        raise ValueError(f"{path} is a directory that holds something else than a checkpoint; choose another path")


def is_unfinished_name(name: str) -> bool:
    """Whether a file at an address has a name that `AtomicDirectory.name_of` gives."""
    return re.match(r"[0-9a-f]{16}-", name) is not None


def new_id() -> str:
    """A random id that is unique in practice."""
    return uuid.uuid4().hex[:16]


def remove(path: Address) -> None:
    """Removes a checkpoint, a file or a link; it is gone from its path in one step, so that no half of it remains."""
    if is_remote(path):
        fs, root = system_of(path)
        if is_checkpoint(path):
            remove_files(path, [MANIFEST_FILE])
        if Folder(path).kind() != "nothing":
            fs.rm(root, recursive=True)
        return
    final = Path(os.path.abspath(path))
    if not os.path.lexists(final):
        return
    aside = hidden(final, REMOVED, new_id())
    make_hidden(aside.parent)
    os.rename(final, aside)
    _delete(aside)


def remove_files(address: Address, names: Iterable[str]) -> None:
    """Removes files of a directory at an address, and the directory if nothing else is in it.

    Raises the first error after all files were tried.
    """
    fs, root = system_of(address)
    errors = []
    for name in names:
        try:
            fs.rm_file(f"{root}/{name}")
        except FileNotFoundError:
            # Another process has removed it.
            continue
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    folder = Folder(address)
    if folder.kind() == "folder" and not folder.sizes() and not folder.folders():
        fs.rmdir(root)


def flush_directory(path: Path) -> None:
    """Flushes the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems flush names by themselves and reject fsync of a directory.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _undo(source: Path, path: Path, aside: Path) -> None:
    """Reverts the renames of `replace`, as far as they came."""
    if not os.path.lexists(source):
        os.rename(path, source)
    if os.path.lexists(aside):
        os.rename(aside, path)
    tidy(aside)


def _delete(aside: Path) -> None:
    """Removes a hidden path; what cannot be removed stays hidden."""
    if aside.is_symlink() or aside.is_file():
        with contextlib.suppress(OSError):
            aside.unlink()
    else:
        shutil.rmtree(aside, ignore_errors=True)
    tidy(aside)


def _holds_something(folder: Folder) -> bool:
    if is_remote(folder.path):
        # Files of an interrupted save are at the path of the next save.
        return bool(folder.folders()) or not all(map(is_unfinished_name, folder.sizes()))
    return any(Path(folder.path).iterdir())


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names in one step; returns False where the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    call: Any = None
    with contextlib.suppress(AttributeError):
        call = ctypes.CDLL(None, use_errno=True).renameat2
    if call is None:
        return False
    paths = os.fsencode(one), os.fsencode(other)
    if call(_AT_WORKING_DIRECTORY, paths[0], _AT_WORKING_DIRECTORY, paths[1], _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))
