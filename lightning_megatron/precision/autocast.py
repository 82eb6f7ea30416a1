"""Autocast by a tensor's device. torch has no autocast for meta tensors, so the host's applies to them."""

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The autocast dtype on the tensor's device, None where autocast is off."""
    device = _device_of(x)
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocast(x: Tensor, dtype: torch.dtype | None) -> torch.autocast:
    """Autocast to `dtype` on the tensor's device inside the block, or none where it is None."""
    return torch.autocast(_device_of(x), dtype=dtype, enabled=dtype is not None)


def _device_of(x: Tensor) -> str:
    return "cpu" if x.is_meta else x.device.type
