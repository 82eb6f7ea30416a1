"""Numbers that the host knows, brought to the device without a wait for it.

A copy from memory that is not pinned makes the host wait for all that the device has to do, unless it is
`non_blocking`: then the driver takes the numbers at once, and the copy takes its place among the kernels. That holds
for a few: long sequences of numbers are to be made on the device, from as few as say what they are.
"""

from typing import Any

import torch
from torch import Tensor


def on_device(numbers: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of these (nested sequences of) numbers."""
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)
