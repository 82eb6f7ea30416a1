"""The choice of an attention kernel by device, dtype and what a step needs."""

import torch
from torch import Tensor

from lightning_megatron.context.attention_step import AttentionStep, Kernel
from lightning_megatron.context.blockwise_attention import BlockwiseAttention
from lightning_megatron.context.flash import FlashAttention
from lightning_megatron.context.flex import LEAST_HEAD_DIM, FlexAttention
from lightning_megatron.context.fused_attention import CpuAttention, MemoryEfficientAttention
from lightning_megatron.context.unfused_attention import UnfusedAttention
from lightning_megatron.mesh import AttentionKernel


def kernel_for(tensor: Tensor, step: AttentionStep, preferred: AttentionKernel = "fused") -> Kernel:
    """Fastest kernel for queries like `tensor` [..., D] that supports the step; or the `preferred` one, if it does.

    A meta tensor stands for one on a current GPU.
    """
    # FlexAttention has no float64. Inductor makes no kernel of its backward for a bias of one row.
    has_flex = tensor.device.type == "cuda" and tensor.dtype != torch.float64
    has_flex &= min(step.query_positions.shape[-1], step.key_positions.shape[-1]) > 1
    if preferred == "flex" and has_flex and tensor.shape[-1] >= LEAST_HEAD_DIM:
        return FlexAttention()
    if step.dropout_keys is not None or step.bias is not None or step.softcap:
        return UnfusedAttention()
    if tensor.device.type == "cpu":
        return BlockwiseAttention(CpuAttention())
    # CUDA's fused kernels read heads in vectors of 8 numbers, and have no float64.
    is_known = tensor.is_meta or tensor.device.type == "cuda"
    if not is_known or tensor.shape[-1] % 8 != 0 or tensor.dtype == torch.float64:
        return UnfusedAttention()
    has_flash = tensor.is_meta or torch.cuda.get_device_capability(tensor.device) >= (8, 0)
    if has_flash and tensor.dtype.itemsize == 2 and tensor.shape[-1] <= 256:
        return FlashAttention()
    return BlockwiseAttention(MemoryEfficientAttention())
