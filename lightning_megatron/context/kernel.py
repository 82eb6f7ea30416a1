"""Which kernel of attention a device has for what is asked; and what callers of kernels need."""

import torch
from torch import Tensor

from lightning_megatron.context.by_blocks import ByBlocks
from lightning_megatron.context.flash import Flash
from lightning_megatron.context.flex import LEAST_HEAD_DIM, Flex
from lightning_megatron.context.laid_out import LaidOut
from lightning_megatron.context.pairing import Bias, Dropping, Gradients, Kernel, Pairing, merge_
from lightning_megatron.context.product import Efficient, Host
from lightning_megatron.mesh import AttentionKernel

__all__ = ["Bias", "Dropping", "Gradients", "Kernel", "Pairing", "kernel_for", "merge_"]


def kernel_for(tensor: Tensor, pairing: Pairing, asked: AttentionKernel = "fused") -> Kernel:
    """The fastest kernel for queries like `tensor` [..., D] that does what the pairing asks; or the one that is asked
    for, where it does that.

    A meta tensor stands for one on a current GPU.
    """
    # Its kernels drop no weights, and know no float64.
    has_flex = tensor.device.type == "cuda" and pairing.dropping is None and tensor.dtype != torch.float64
    if asked == "flex" and has_flex and tensor.shape[-1] >= LEAST_HEAD_DIM:
        return Flex()
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
