"""A store in memory that counts what goes through it, and the sockets of this process: what a process group costs."""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch.distributed as dist

_TIMEOUT = timedelta(seconds=30)


class CountingStore(dist.Store):
    """Counts the bytes of all keys and values that are written and read. The ranks are threads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._values[key] = data
            self.num_bytes += len(key) + len(data)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self._until_there([key])
        with self._changed:
            self.num_bytes += len(key) + len(self._values[key])
            return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        self._until_there(keys)
        with self._changed:
            self.num_bytes += sum(map(len, keys))

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            # A counter travels as eight bytes.
            self.num_bytes += len(key) + 8
            self._changed.notify_all()
            return total

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:  # type: ignore[override]
        return [self.get(key) for key in keys]

    def has_extended_api(self) -> bool:
        return True

    def _until_there(self, keys: Sequence[str]) -> None:
        with self._changed:
            there = self._changed.wait_for(lambda: all(key in self._values for key in keys), _TIMEOUT.total_seconds())
            assert there, f"nobody has written {sorted(set(keys) - self._values.keys())}"


def num_sockets() -> int:
    """Sockets that this process has open."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except FileNotFoundError:
            # That of the listing itself.
            continue
    return found


@lru_cache(maxsize=64)
def gloo_cost(num_ranks: int) -> tuple[int, int]:
    """Bytes through the store for a group of gloo of so many ranks, which is really made, and sockets of each rank."""
    store, before = CountingStore(), num_sockets()
    with ThreadPoolExecutor(num_ranks) as ranks:
        made = [
            ranks.submit(dist.ProcessGroupGloo, dist.PrefixStore("group", store), rank, num_ranks, _TIMEOUT)
            for rank in range(num_ranks)
        ]
        groups = [one.result() for one in made]
    num_open = num_sockets() - before
    del groups
    return store.num_bytes, -(-num_open // num_ranks)
