"""Memory that a process holds, and its peak since a reset: on a GPU as the allocator counts, else the process's own.

name              what it counts
allocated         tensors on the GPU, by torch's allocator
resident          pages of the process in memory, all of them: Python and torch too
resident_so_far   the same, but the most since the process began, where the system does not let the peak be reset
"""

import resource
import sys
from pathlib import Path
from typing import Literal

import torch

MeterName = Literal["allocated", "resident", "resident_so_far"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Source: proc(5), clear_refs.
_CLEARS_PEAK = "5"


class GpuMeter:
    """Meter of one GPU. It resets torch's own peaks, which others may look at."""

    name: MeterName = "allocated"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reserved_bytes(self) -> int:
        """Most bytes that the allocator took from the device."""
        return torch.cuda.max_memory_reserved(self._device)


class ResidentMeter:
    """Meter of a process on Linux."""

    name: MeterName = "resident"

    def reset(self) -> None:
        _CLEAR.write_text(_CLEARS_PEAK)

    def peak_bytes(self) -> int:
        lines = _STATUS.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    def reserved_bytes(self) -> int:
        return 0


class ResidentSoFarMeter(ResidentMeter):
    """Meter of a process on other systems, and where Linux refuses to reset the peak."""

    name = "resident_so_far"

    def reset(self) -> None:
        """Does nothing: this peak only grows."""

    def peak_bytes(self) -> int:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


Meter = GpuMeter | ResidentMeter
"""Meter of a GPU or of a process; `reset` makes the peak what is held now."""


def meter_of(device: torch.device) -> Meter:
    """The best available meter for a process that computes on the device."""
    if device.type == "cuda":
        return GpuMeter(device)
    meter = ResidentMeter()
    try:
        meter.reset()
        meter.peak_bytes()
    except (OSError, StopIteration):
        return ResidentSoFarMeter()
    return meter
