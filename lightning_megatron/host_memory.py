"""The memory of this machine."""

import os

import torch
from torch import Tensor


def machine_memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_zeros(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory, pinned where `device` is a GPU, so that copies between the two do not wait.

    Beside the meta device there is no memory: they are on it.
    """
    if device.type == "meta":
        return torch.zeros(num_elements, dtype=dtype, device=device)
    return torch.zeros(num_elements, dtype=dtype, pin_memory=device.type == "cuda")


def wait_for_copies(device: torch.device) -> None:
    """Waits until the host has what is being copied to it from the device."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
