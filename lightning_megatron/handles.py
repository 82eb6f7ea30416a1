"""Handles: tensors that stand for objects in compiled code, for custom operators to look up.

Compiled code is one for the values that it has read, and is compiled anew for others. What it hands on as a tensor it
reads nothing of: layouts of packed documents, of which every batch has another, go through it so.
"""

from typing import Any

import torch
from torch import Tensor


def handle_of(value: Any) -> Tensor:
    """A new handle of an object, on the host. It keeps the object, also where it is saved for a backward."""
    handle = torch.empty(1, dtype=torch.uint8, device="cpu")
    # The storage and not the tensor: what autograd saved may come back as another tensor of that storage.
    handle.untyped_storage().held = value  # type: ignore[attr-defined]
    return handle


def held_by(handle: Tensor) -> Any:
    """The object of a handle."""
    return handle.untyped_storage().held  # type: ignore[attr-defined]
