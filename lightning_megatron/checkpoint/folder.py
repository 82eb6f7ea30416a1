"""A directory or a file on a mounted file system, or at any address that fsspec knows."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, cast

import fsspec

Address = str | os.PathLike[str]


def is_remote(path: Address) -> bool:
    """Whether the path is an address (`s3://bucket/a.ckpt`) and not a path of a mounted file system."""
    return "://" in str(path)


def name_at(path: Address) -> str:
    """The last part of a path or an address."""
    return os.path.basename(os.fspath(path).rstrip("/"))


def paths_in(folder: Path) -> list[Path]:
    """Paths in a directory of a mounted file system, sorted; none where there is no directory."""
    # `glob` would fail where a directory vanishes meanwhile.
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def system_of(path: Address) -> tuple[Any, str]:
    """File system of a path or an address, and the path there. Raises ValueError for an unknown one."""
    if not os.fspath(path):
        raise ValueError("the path is empty; give one, or '.' for the folder that you are in")
    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(os.fspath(path))
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{path} is an address of no file system that can be used: {error}. It must begin with the name of one "
            "that fsspec knows (s3://, gs://, file://), whose package is installed"
        ) from error
    return found


def is_torch_file(path: Address) -> bool:
    """Whether a file begins as torch.save begins one: a zip archive or, in older versions of torch, a pickle."""
    system, place = system_of(path)
    with system.open(place, "rb") as stream:
        head: bytes = stream.read(4)
    return head == b"PK\x03\x04" or head[:1] == b"\x80"


@contextmanager
def store_errors_as_os_errors(*paths: Address) -> Iterator[None]:
    """Turns errors of packages for addresses (credentials, connections) into OSError."""
    try:
        yield
    except Exception as error:
        package, remote = type(error).__module__.partition(".")[0], [str(path) for path in paths if is_remote(path)]
        if not remote or package in sys.stdlib_module_names | {"lightning_megatron", "lightning", "torch"}:
            raise
        raise OSError(f"{' and '.join(remote)}: {type(error).__name__}: {error}") from error


class Folder:
    """The directory at a path; each call asks the file system anew.

    Behind an address something is missing only if the file system says so: any other error is raised.
    """

    def __init__(self, path: Address) -> None:
        self.path = os.fspath(path)
        self._fs, self._root = system_of(path)

    def has(self, name: str) -> bool:
        """Whether the directory has a file of that name."""
        return self._type_of(self._at(name)) == "file"

    def sizes(self) -> dict[str, int]:
        """Bytes of each file in the directory."""
        self._fs.invalidate_cache()
        found = self._fs.ls(self._root, detail=True)
        return {os.path.basename(file["name"]): int(file["size"]) for file in found if file["type"] == "file"}

    def folders(self) -> list[str]:
        """Names of the directories in the directory."""
        self._fs.invalidate_cache()
        found = self._fs.ls(self._root, detail=True)
        return sorted(os.path.basename(one["name"].rstrip("/")) for one in found if one["type"] == "directory")

    def changed_seconds(self, name: str) -> float:
        """Time of a file's last change, in seconds since 1970; 0 where the file system does not tell."""
        try:
            return float(self._fs.modified(self._at(name)).timestamp())
        except NotImplementedError:
            return 0.0

    def read(self, name: str) -> bytes:
        """Content of a file."""
        with self.open(name) as stream:
            return stream.read()

    def open(self, name: str) -> IO[bytes]:
        """Opens a file for reading and seeking."""
        return cast(IO[bytes], self._fs.open(self._at(name), "rb"))

    def kind(self) -> Literal["folder", "file", "link", "device", "nothing"]:
        """The kind of file at the path; links that lead to a folder or a file are followed, a pipe is a device."""
        found = self._type_of(self._root)
        if found == "directory":
            return "folder"
        if found == "file":
            return "file"
        if is_remote(self.path) or not os.path.lexists(self.path):
            return "nothing"
        return "link" if os.path.islink(self.path) else "device"

    def target(self) -> str:
        """Target of the link at the path."""
        return os.readlink(self.path)

    def _type_of(self, path: str) -> str:
        """`directory`, `file`, or something else."""
        if not is_remote(self.path):
            return "directory" if os.path.isdir(path) else "file" if os.path.isfile(path) else ""
        self._fs.invalidate_cache()
        # `isdir` and `isfile` would take any error for an answer.
        try:
            return str(self._fs.info(path)["type"])
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"
