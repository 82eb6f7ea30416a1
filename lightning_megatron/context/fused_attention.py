"""Fused attention of one rectangle, queries [B, A, Q, D] and keys [B, G, K, D], by torch's kernels.

B batch, A query heads, G key heads, Q query rows, K key rows, D head size.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.context.attention_step import BackwardInputs


class FusedAttention(Protocol):
    """Attention of all queries to all keys, under `is_causal` (query i sees keys 0 to i) or `mask`."""

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, is_causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp; undefined for a query that sees no key."""

    def backward(
        self, inputs: BackwardInputs, is_causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values; a query whose log-sum-exp is inf adds nothing.

        `grad` and `output` may be wider than the rest.
        """


# Up to this many tokens the CPU's backward is faster in float32 than in 16 bits, and its forward no slower.
_MOST_WIDENED = 256


class CpuAttention:
    """torch's fused attention on a CPU; it supports grouped queries."""

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, is_causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        dtype = _host_dtype(queries, keys)
        queries, keys, values = (x.to(dtype) for x in (queries, keys, values))
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, is_causal, attn_mask=None if mask is None else mask.to(dtype), scale=scale
        )
        return output, lse

    def backward(
        self, inputs: BackwardInputs, is_causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, queries, keys, values, output, lse = inputs
        dtype = _host_dtype(queries, keys)
        grad, queries, keys, values, output = (x.to(dtype) for x in (grad, queries, keys, values, output))
        mask = None if mask is None else mask.to(dtype)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, queries, keys, values, output, lse, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return grads


def _host_dtype(queries: Tensor, keys: Tensor) -> torch.dtype:
    """The dtype in which the CPU computes a rectangle."""
    is_widened = queries.dtype.itemsize == 2 and max(queries.shape[2], keys.shape[2]) <= _MOST_WIDENED
    return torch.float32 if is_widened else queries.dtype


class MemoryEfficientAttention:
    """torch's memory-efficient attention on CUDA, float32 or 16 bits; it needs a key for each query head."""

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, is_causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        heads = queries.shape[1]
        q, k, v = (_by_token(x, heads) for x in (queries, keys, values))
        output, lse, *_ = torch.ops.aten._efficient_attention_forward(
            q, k, v, _aligned(mask, queries), None, None, None, None, 0.0, int(is_causal), True, scale=scale
        )
        # The log-sum-exp is padded beyond the last query.
        return output.transpose(1, 2), lse[..., : queries.shape[2]]

    def backward(
        self, inputs: BackwardInputs, is_causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, queries, keys, values, output, lse = inputs
        heads, groups = queries.shape[1], keys.shape[1]
        same = (x.to(queries.dtype) for x in (grad, queries, keys, values, output))
        g, q, k, v, out = (_by_token(x, heads) for x in same)
        # The kernel needs rows in multiples of 32; those beyond the last query add nothing.
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
        unused = torch.zeros((), dtype=torch.int64, device=lse.device)
        grads = torch.ops.aten._efficient_attention_backward(
            g,
            q,
            k,
            v,
            _aligned(mask, queries),
            out,
            None,
            None,
            q.shape[1],
            k.shape[1],
            lse,
            0.0,
            unused,
            unused,
            int(is_causal),
            False,
            scale=scale,
        )
        queries_grad, keys_grad, values_grad = (x.transpose(1, 2) for x in grads[:3])
        return queries_grad, _sum_heads(keys_grad, groups), _sum_heads(values_grad, groups)


def _by_token(x: Tensor, heads: int) -> Tensor:
    """Transposes [B, G, K, D] to [B, K, A, D], a head repeated for each query head of its group."""
    repeated = x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
    return repeated.transpose(1, 2)


def _sum_heads(grad: Tensor, groups: int) -> Tensor:
    """Sums gradients of repeated heads [B, A, K, D] in float32 to those of the heads [B, G, K, D]."""
    by_group: Tensor = grad.unflatten(1, (groups, -1))
    return by_group.sum(dim=2, dtype=torch.float32)


def _aligned(mask: Tensor | None, queries: Tensor) -> Tensor | None:
    """The mask of every head, its row stride a multiple of 16: CUDA reads rows in vectors."""
    if mask is None:
        return None
    aligned = F.pad(mask, (0, -mask.shape[1] % 16))[:, : mask.shape[1]]
    return aligned.expand(*queries.shape[:2], -1, -1)
