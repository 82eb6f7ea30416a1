"""Which kernel of attention a device has for what is asked; and what callers of kernels need."""

import torch
from torch import Tensor

from lightning_megatron.context.by_blocks import ByBlocks
from lightning_megatron.context.flash import Flash
from lightning_megatron.context.laid_out import LaidOut
from lightning_megatron.context.pairing import Bias, Dropping, Gradients, Kernel, Pairing, merge_
from lightning_megatron.context.product import Efficient, Host

__all__ = ["Bias", "Dropping", "Gradients", "Kernel", "Pairing", "kernel_for", "merge_"]


def kernel_for(tensor: Tensor, pairing: Pairing) -> Kernel:
    """The fastest kernel for queries like `tensor` [..., D] that does what the pairing asks.

    A meta tensor stands for one on a current GPU.
    """
    if pairing.dropping is not None or pairing.bias is not None:
        return LaidOut()
    if tensor.device.type == "cpu":
        return ByBlocks(Host())
    # CUDA's functions read heads in vectors of 8 numbers, and know no float64.
    is_known = tensor.is_meta or tensor.device.type == "cuda"
    if not is_known or tensor.shape[-1] % 8 != 0 or tensor.dtype == torch.float64:
        return LaidOut()
    has_flash = tensor.is_meta or torch.cuda.get_device_capability(tensor.device) >= (8, 0)
    if has_flash and tensor.dtype.itemsize == 2 and tensor.shape[-1] <= 256:
        return Flash()
    return ByBlocks(Efficient())
