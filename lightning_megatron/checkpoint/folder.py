"""A directory to read from, on a mounted file system or behind any address that fsspec knows."""

import os
from typing import IO, Any, Literal, cast

import fsspec

Address = str | os.PathLike[str]


def is_remote(path: Address) -> bool:
    """Whether the path is an address (`s3://bucket/a.ckpt`) and not a path of a mounted file system."""
    return "://" in str(path)


class Folder:
    """What is at a path now; nothing is remembered between two questions."""

    def __init__(self, path: Address) -> None:
        self.path = os.fspath(path)
        self._fs: Any
        self._fs, self._root = fsspec.core.url_to_fs(self.path)

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""
        return bool(self._fs.isfile(self._at(name)))

    def sizes(self) -> dict[str, int]:
        """Bytes of each file in the directory."""
        self._fs.invalidate_cache()
        found = self._fs.ls(self._root, detail=True)
        return {os.path.basename(file["name"]): int(file["size"]) for file in found if file["type"] == "file"}

    def folders(self) -> list[str]:
        """Names of what is no file in the directory."""
        found = self._fs.ls(self._root, detail=True)
        return sorted(os.path.basename(one["name"].rstrip("/")) for one in found if one["type"] == "directory")

    def read(self, name: str) -> bytes:
        """A file's content."""
        with self.open(name) as stream:
            return stream.read()

    def open(self, name: str) -> IO[bytes]:
        """A file to read and seek in."""
        return cast(IO[bytes], self._fs.open(self._at(name), "rb"))

    def kind(self) -> Literal["folder", "file", "link", "nothing"]:
        """What is at the path; a link that leads somewhere is what it leads to."""
        if self._fs.isdir(self._root):
            return "folder"
        if self._fs.isfile(self._root):
            return "file"
        return "link" if not is_remote(self.path) and os.path.islink(self.path) else "nothing"

    def target(self) -> str:
        """Where a link at the path leads."""
        return os.readlink(self.path)

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"
