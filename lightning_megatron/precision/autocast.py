"""What autocast asks of a tensor. A meta tensor stands for one on a device, of which torch keeps no autocast: that of
the host speaks for it."""

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of products on the tensor's device, None where autocast is off."""
    device = _device_of(x)
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocast(x: Tensor, dtype: torch.dtype | None) -> torch.autocast:
    """A block in which products on the tensor's device are in `dtype`; in that of their operands where it is None."""
    return torch.autocast(_device_of(x), dtype=dtype, enabled=dtype is not None)


def _device_of(x: Tensor) -> str:
    return "cpu" if x.is_meta else x.device.type
