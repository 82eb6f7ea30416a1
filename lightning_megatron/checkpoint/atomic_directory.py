"""A checkpoint on its way: files that nobody takes for a checkpoint until one step makes them one.

On a mounted file system they lie in a hidden directory beside the final place, and the step is a rename, after every
file and the directory have been flushed to the disk. Where another checkpoint stands, the two change places in that one
step. Behind an address (an object store has no renames) the files lie in the final place, under names that begin with
the save's id, and the step is to write the manifest. Nothing that fails after that step undoes it: what the checkpoint
before had stays then, as no part of this one, and the next save there removes it.
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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import fsspec

from lightning_megatron.checkpoint.folder import Address, Folder, is_remote, system_of
from lightning_megatron.checkpoint.manifest import MANIFEST_FILE, is_checkpoint, read_stored_manifest

# Beside a checkpoint stands `.{what}/{save's id}/{its name}`: who looks for checkpoints in the folder finds none.
UNFINISHED, REPLACED, REMOVED = ".unfinished", ".replaced", ".removed"
_AT_WORKING_DIRECTORY, _EXCHANGE = -100, 2


@dataclass(frozen=True)
class AtomicDirectory:
    """Where a save's files go; the same on every rank."""

    path: str
    save_id: str

    @staticmethod
    def start(path: Address, save_id: str) -> "AtomicDirectory":
        """An empty one whose directory has been made. Raises ValueError where something else is at the path."""
        draft = AtomicDirectory(os.fspath(path), save_id)
        folder = Folder(path)
        if folder.kind() == "folder" and not is_checkpoint(path) and _holds_something(folder):
            raise ValueError(f"{path} is a directory that holds something else than a checkpoint; choose another path")
        if is_remote(path):
            fs, root = system_of(path)
            fs.makedirs(root, exist_ok=True)
        else:
            made = [parent for parent in draft._final.parents if not parent.exists()]
            try:
                draft._hidden.mkdir(parents=True)
                for parent in made:
                    flush_directory(parent.parent)
            except OSError:
                draft.discard()
                raise
        return draft

    @property
    def _final(self) -> Path:
        # The parents may be links; the name itself is what is replaced.
        return Path(os.path.abspath(self.path))

    @property
    def _hidden(self) -> Path:
        return hidden(self._final, UNFINISHED, self.save_id)

    def name_of(self, name: str) -> str:
        """The name under which the file is written."""
        return f"{self.save_id}-{name}" if is_remote(self.path) else name

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """A new file, on the disk for good when the block ends."""
        if is_remote(self.path):
            with fsspec.open(f"{self.path.rstrip('/')}/{name}", "wb") as stream:
                yield cast(IO[bytes], stream)
            return
        with open(self._hidden / name, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    def link(self, name: str, other: "AtomicDirectory") -> None:
        """A file that is the same as in the other, which is in place. Raises OSError where there can be no link."""
        os.link(other._final / name, self._hidden / name)

    def drop(self, name: str) -> None:
        """Removes the file if it is there."""
        (self._hidden / name).unlink(missing_ok=True)

    def put_in_place(self, manifest: bytes) -> None:
        """Makes the files the checkpoint at the path. Raises OSError; then what was there is there still."""
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
        tidy(self._hidden)

    def discard(self) -> None:
        """Removes what was written, unless it is the checkpoint at the path by now.

        Raises nothing behind an address, whoever discards has a fault to tell: what cannot be removed stays.
        """
        if not is_remote(self.path):
            shutil.rmtree(self._hidden, ignore_errors=True)
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
    """The hidden neighbour of a checkpoint."""
    return path.parent / what / save_id / path.name


def tidy(neighbour: Path) -> None:
    """Removes the folders of a hidden neighbour that is gone, unless they hold another."""
    for folder in (neighbour.parent, neighbour.parent.parent):
        with contextlib.suppress(OSError):
            folder.rmdir()


def replace(source: Path, path: Path, save_id: str) -> None:
    """Renames `source` to `path`; what was there, whatever it is, is removed after that.

    One step where the file system can exchange two names. Where it cannot, what was there is set aside first, under a
    name by which `repair` brings it back if the machine stops just then.
    """
    # lexists: a link to a checkpoint elsewhere is replaced, not followed.
    aside = hidden(path, REPLACED, save_id)
    is_exchanged = os.path.lexists(path) and _exchange(source, path)
    try:
        if not is_exchanged:
            if os.path.lexists(path):
                aside.parent.mkdir(parents=True)
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


def is_unfinished_name(name: str) -> bool:
    """Whether a file behind an address is named as `AtomicDirectory.name_of` names those of a save."""
    return re.match(r"[0-9a-f]{16}-", name) is not None


def new_id() -> str:
    """A name that nothing else has."""
    return uuid.uuid4().hex[:16]


def remove(path: Address) -> None:
    """Removes a checkpoint, a file or a link: gone from its place in one step, so that no half of it is ever there."""
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
    aside.parent.mkdir(parents=True)
    os.rename(final, aside)
    _delete(aside)


def remove_files(address: Address, names: Iterable[str]) -> None:
    """Removes files of a directory behind an address, all that can be, and the directory where it has nothing else.

    Raises the first error there was.
    """
    fs, root = system_of(address)
    errors = []
    for name in names:
        try:
            fs.rm_file(f"{root}/{name}")
        except FileNotFoundError:
            # Whoever else removes it.
            continue
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    folder = Folder(address)
    if folder.kind() == "folder" and not folder.sizes() and not folder.folders():
        fs.rmdir(root)


def flush_directory(path: Path) -> None:
    """Puts the directory's names on the disk for good."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems keep names by themselves and know no such call for a directory.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _undo(source: Path, path: Path, aside: Path) -> None:
    """Takes the renames of `replace` back, as far as they came."""
    if not os.path.lexists(source):
        os.rename(path, source)
    if os.path.lexists(aside):
        os.rename(aside, path)
    tidy(aside)


def _delete(aside: Path) -> None:
    """Removes what is in nobody's way any more; what cannot be removed stays hidden."""
    if aside.is_symlink() or aside.is_file():
        with contextlib.suppress(OSError):
            aside.unlink()
    else:
        shutil.rmtree(aside, ignore_errors=True)
    tidy(aside)


def _holds_something(folder: Folder) -> bool:
    if is_remote(folder.path):
        # What a save left that was interrupted stands where the next one goes.
        return bool(folder.folders()) or not all(map(is_unfinished_name, folder.sizes()))
    return any(Path(folder.path).iterdir())


def _exchange(one: Path, other: Path) -> bool:
    """Lets two names change places in one step; False where the system or the file system cannot."""
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
