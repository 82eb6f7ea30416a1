"""An object store in this process's memory: no directories but those of files, and requests that fail on demand."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class ObjectStore(MemoryFileSystem):
    """Behind `objects://`; `fails` says of a request (`write`, `remove` or `ask`) and a path whether it fails."""

    protocol = "objects"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fails: Callable[[str, str], bool] = staticmethod(lambda request, path: False)
    remembered: ClassVar[dict[str, Any]] = {}
    """What `info` answered, as remote file systems keep it."""

    @classmethod
    def meet(cls, request: str, path: str) -> None:
        if cls.fails(request, path):
            raise OSError(f"503 SlowDown: {request}")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes nothing, as there is nothing to make."""

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self.meet("ask", path)
        inside = self._strip_protocol(path).rstrip("/") + "/"
        if not any(name.startswith(inside) for name in self.store):
            raise FileNotFoundError(path)
        return super().ls(path, detail=detail, **options)

    def info(self, path: str, **options: Any) -> Any:
        self.meet("ask", path)
        if path not in self.remembered:
            self.remembered[path] = super().info(path, **options)
        return self.remembered[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.remembered.clear()

    def rm_file(self, path: str) -> None:
        self.meet("remove", path)
        super().rm_file(path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        inside = self._strip_protocol(path) + "/"
        for name in [name for name in self.store if name.startswith(inside)]:
            self.rm_file(name)

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        self.meet("ask" if mode == "rb" else "write", path)
        return super()._open(path, mode, *args, **options)


class NoCredentialsError(Exception):
    """An error as clients of stores have: of their own package, and of no kind that Python knows."""

    __module__ = "botocore.exceptions"


def without_credentials(request: str, path: str) -> bool:
    """Fails every request by an error of the client, for `failing`."""
    raise NoCredentialsError("unable to locate credentials")


@contextmanager
def failing(fails: Callable[[str, str], bool]) -> Iterator[None]:
    """Inside, the requests fail of which it says so."""
    before, ObjectStore.fails = ObjectStore.fails, staticmethod(fails)
    try:
        yield
    finally:
        ObjectStore.fails = before


@contextmanager
def emptied() -> Iterator[str]:
    """The address of an empty folder."""
    fsspec.register_implementation("objects", ObjectStore, clobber=True)
    ObjectStore.store.clear()
    ObjectStore.remembered.clear()
    yield "objects://bucket/runs"
    ObjectStore.store.clear()
