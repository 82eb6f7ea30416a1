"""Locks that say which process saves: the system drops them when the process ends, however it ends.

    .unfinished/{id}/     is locked while its save is written: what nobody holds is left of an interrupted save
    .run.lock             is held by the first rank of a run while it saves into the folder

Neither is fooled by files that a killed run leaves: a lock is of a process, not of a file. The first rank holds both,
so that they speak for a run of many machines, where the file system shares its locks: NFS those of files (a folder has
one live run), Lustre with `-o flock` those of directories too. Without locks nothing is refused, and leftovers stay
until `prune` removes them.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
from pathlib import Path

from lightning_megatron.checkpoint.folder import paths_in

RUN_LOCK = ".run.lock"
# Names that saves give to their directories; all others are somebody's own.
_SAVE_ID = re.compile(r"[0-9a-f]{16}")
_HELD = (errno.EAGAIN, errno.EACCES)


class FolderInUseError(ValueError):
    """Another process that lives saves into a folder."""


class SaveLock:
    """The lock of one unfinished save, in the process of its first rank; elsewhere it is empty."""

    def __init__(self, descriptor: int = -1) -> None:
        self._descriptor = descriptor

    @staticmethod
    def of(folder: Path) -> "SaveLock | None":
        """The lock of a directory of an unfinished save; empty where there are no locks, None where it is taken."""
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return None
        except OSError:
            return SaveLock()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it before may have removed the directory.
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                return SaveLock(descriptor)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in _HELD:
                os.close(descriptor)
                return SaveLock()
        os.close(descriptor)
        return None

    @property
    def is_held(self) -> bool:
        """Whether the file system has such locks, and this process holds this one."""
        return self._descriptor >= 0

    def release(self) -> None:
        """Lets others take it."""
        if self.is_held:
            os.close(self._descriptor)
            self._descriptor = -1

    def __reduce__(self) -> tuple[type["SaveLock"], tuple[()]]:
        # It is of one process.
        return SaveLock, ()


def remove_interrupted(hidden: Path) -> None:
    """Removes the directories that no process holds; what cannot be removed stays."""
    # A save is complete by now: nothing here may make it fail.
    with contextlib.suppress(OSError):
        for folder in paths_in(hidden):
            lock = SaveLock.of(folder) if _SAVE_ID.fullmatch(folder.name) else None
            if lock is not None and lock.is_held:
                shutil.rmtree(folder, ignore_errors=True)
                lock.release()
        hidden.rmdir()


class FolderOwner:
    """A folder that this process saves into, and no other one, until it is released or the process ends."""

    def __init__(self, path: Path, descriptor: int, *, is_new: bool) -> None:
        self._path = path
        self._descriptor = descriptor
        self._is_new = is_new

    @staticmethod
    def take(folder: Path) -> "FolderOwner | None":
        """The ownership of the folder, which is made; None where its file system has no locks, or cannot be written to.

        Raises FolderInUseError where another process that lives has it.
        """
        path, is_new = folder / RUN_LOCK, not folder.exists()
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError:
                # The first save says what is wrong.
                return None
            try:
                # Not `flock`: workers that the process has forked would hold it on.
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                    return FolderOwner(path, descriptor, is_new=is_new)
            except FileNotFoundError:
                # The owner before has just left.
                pass
            except OSError as error:
                holder = (
                    os.pread(descriptor, 200, 0).decode(errors="replace") or "a process that tells nothing of itself"
                )
                if error.errno not in _HELD:
                    os.close(descriptor)
                    return None
                os.close(descriptor)
                raise FolderInUseError(
                    f"{folder} is saved into by another run that still lives ({holder}); the two would "
                    "replace each other's checkpoints. Give this run a folder of its own "
                    "(ModelCheckpoint(dirpath=...)), or end the other one first"
                ) from error
            os.close(descriptor)

    def release(self) -> None:
        """Gives the folder up, and leaves nothing in it."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._descriptor)
        if self._is_new:
            with contextlib.suppress(OSError):
                self._path.parent.rmdir()
