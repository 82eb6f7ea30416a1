"""Peak memory of tensors on the host, as the kernel counts it, whoever allocates them.

What a process holds beside tensors, such as imported code, is taken off: the resident bytes at the beginning without
the large blocks of the C library. Under `ENVIRONMENT` that library maps each block of 64 KiB or more by itself and
gives it back to the kernel when it is freed, so that resident bytes are those of live tensors, and of what sends them.
"""

import ctypes
import os
import re
from pathlib import Path

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_MMAP_MAX_": str(1 << 20)}


# Fields of glibc's struct mallinfo2; hblkhd is the bytes in blocks that are mapped by themselves.
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


class PeakMemory:
    """Largest number of bytes in tensors from `begin` to `end`; 0 where the process was not started with
    `ENVIRONMENT`."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._others: int | None = None

    def begin(self) -> None:
        """Sets the peak back to what is there now."""
        if all(os.environ.get(name) == value for name, value in ENVIRONMENT.items()):
            Path("/proc/self/clear_refs").write_text("5")
            mallinfo2 = ctypes.CDLL(None).mallinfo2
            mallinfo2.restype = _Mallinfo2
            self._others = _resident_bytes("VmRSS") - int(mallinfo2().hblkhd)

    def end(self) -> None:
        """Takes the peak since `begin`."""
        if self._others is not None:
            self.num_bytes = _resident_bytes("VmHWM") - self._others


def _resident_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"/proc/self/status has no {name}"
    return int(found[1]) * 1024
