"""Core attention of unsharded sequences, without a bias or dropout: a value that a `SelfAttention` holds.

    TorchCoreAttention    torch's kernels                 everywhere
    TECoreAttention       Transformer Engine's kernels    layers that multiply in FP8 by that engine (`te_attention`)

B batch, A query heads here, G key-value groups here, S sequence, D head size.
"""

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.context.context_layout import MaskSpec
from lightning_megatron.transformer.sliding_window import Masks, sliding_window_attention


class CoreAttention(Protocol):
    """Attention of queries [B, A, S, D] to keys and values [B, G, S, D]: [B, A, S, D]."""

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Tensor:
        """Attention output; `masks` caches what several layers of a call may share."""
        ...


@dataclass(frozen=True, kw_only=True)
class TorchCoreAttention:
    """Core attention by torch's kernels."""

    mask_spec: MaskSpec
    scale: float
    """Factor of scores."""

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Tensor:
        if 0 < self.mask_spec.window < queries.shape[2]:
            return sliding_window_attention(queries, keys, values, self.mask_spec.window, masks, scale=self.scale)
        is_grouped = keys.shape[1] != queries.shape[1]
        return F.scaled_dot_product_attention(
            queries, keys, values, is_causal=self.mask_spec.is_causal, scale=self.scale, enable_gqa=is_grouped
        )
