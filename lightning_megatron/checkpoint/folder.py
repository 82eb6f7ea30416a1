"""A directory to read from, on a mounted file system or behind any address that fsspec knows."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Literal, cast

import fsspec

Address = str | os.PathLike[str]


def is_remote(path: Address) -> bool:
    """Whether the path is an address (`s3://bucket/a.ckpt`) and not a path of a mounted file system."""
    return "://" in str(path)


def name_at(path: Address) -> str:
    """The last part of a path or an address."""
    return os.path.basename(os.fspath(path).rstrip("/"))


def system_of(path: Address) -> tuple[Any, str]:
    """The file system of a path or an address, and the path there. Raises ValueError where there is none for it."""
    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(os.fspath(path))
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{path} is an address of no file system that can be used: {error}. It must begin with the name of one "
            "that fsspec knows (s3://, gs://, file://), whose package is installed"
        ) from error
    return found


@contextmanager
def store_errors_told(*paths: Address) -> Iterator[None]:
    """Raises OSError for what packages behind addresses raise of their own: of credentials, of a connection."""
    try:
        yield
    except Exception as error:
        package, remote = type(error).__module__.partition(".")[0], [str(path) for path in paths if is_remote(path)]
        if not remote or package in sys.stdlib_module_names | {"lightning_megatron", "lightning", "torch"}:
            raise
        raise OSError(f"{' and '.join(remote)}: {type(error).__name__}: {error}") from error


class Folder:
    """What is at a path now; nothing is remembered between two questions.

    Behind an address only what is said not to be there is not there: what keeps the file system from an answer is
    raised, as it comes.
    """

    def __init__(self, path: Address) -> None:
        self.path = os.fspath(path)
        self._fs, self._root = system_of(path)

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""
        return self._type_of(self._at(name)) == "file"

    def sizes(self) -> dict[str, int]:
        """Bytes of each file in the directory."""
        self._fs.invalidate_cache()
        found = self._fs.ls(self._root, detail=True)
        return {os.path.basename(file["name"]): int(file["size"]) for file in found if file["type"] == "file"}

    def folders(self) -> list[str]:
        """Names of what is no file in the directory."""
        self._fs.invalidate_cache()
        found = self._fs.ls(self._root, detail=True)
        return sorted(os.path.basename(one["name"].rstrip("/")) for one in found if one["type"] == "directory")

    def changed_seconds(self, name: str) -> float:
        """When a file was last changed, in seconds since 1970; 0 where its file system does not tell."""
        try:
            return float(self._fs.modified(self._at(name)).timestamp())
        except NotImplementedError:
            return 0.0

    def read(self, name: str) -> bytes:
        """A file's content."""
        with self.open(name) as stream:
            return stream.read()

    def open(self, name: str) -> IO[bytes]:
        """A file to read and seek in."""
        return cast(IO[bytes], self._fs.open(self._at(name), "rb"))

    def kind(self) -> Literal["folder", "file", "link", "nothing"]:
        """What is at the path; a link that leads somewhere is what it leads to."""
        found = self._type_of(self._root)
        if found == "directory":
            return "folder"
        if found == "file":
            return "file"
        return "link" if not is_remote(self.path) and os.path.islink(self.path) else "nothing"

    def target(self) -> str:
        """Where a link at the path leads."""
        return os.readlink(self.path)

    def _type_of(self, path: str) -> str:
        """`directory`, `file` or, where it is neither, something else."""
        if not is_remote(self.path):
            return "directory" if os.path.isdir(path) else "file" if os.path.isfile(path) else ""
        self._fs.invalidate_cache()
        # Not isdir and isfile: to those any error is an answer.
        try:
            return str(self._fs.info(path)["type"])
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"
