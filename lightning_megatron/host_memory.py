"""The memory of this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def machine_memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_zeros(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros in host memory, pinned where `device` is a GPU, so that copies between the two do not wait.

    Beside the meta device there is no memory: they are on it.
    """
    # Whoever asks for the size of the memory alone need not wait for torch.
    import torch

    if device.type == "meta":
        return torch.zeros(num_elements, dtype=dtype, device=device)
    return torch.zeros(num_elements, dtype=dtype, pin_memory=device.type == "cuda")


def wait_for_copies(device: torch.device) -> None:
    """Waits until the host has what is being copied to it from the device."""
    if device.type == "cuda":
        import torch

        torch.cuda.current_stream(device).synchronize()
