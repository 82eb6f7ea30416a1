"""Torch's own attention of unsharded sequences: one kernel that saves no weights, where the device has one.

Torch takes no kernel for meta tensors and would materialise their weights. Here they stand for tensors on a current
GPU, and get the kernel that torch would take there: flash attention in 16 bits without a mask, else the
memory-efficient one, which takes no grouped queries.

B batch, A query heads, G key heads, Q query rows, K key rows, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def fused_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention of queries [B, A, Q, D] to keys and values [B, G, K, D]: [B, A, Q, D]. `mask` is added to scores."""
    is_grouped = keys.shape[1] != queries.shape[1]
    is_half = queries.dtype.itemsize == 2
    if queries.is_meta and is_half and mask is None:
        attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            queries, keys, values, 0.0, is_causal, False, scale=scale
        )[0]
    elif queries.is_meta and queries.dtype != torch.float64 and not is_grouped:
        added = None if mask is None else mask.expand(*queries.shape[:-1], keys.shape[2])
        attended = torch.ops.aten._scaled_dot_product_efficient_attention(
            queries, keys, values, added, torch.is_grad_enabled(), 0.0, is_causal, scale=scale
        )[0]
    else:
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
        )
    return attended
