"""Attention block by block, by a fused kernel that computes one rectangle of queries and keys.

Blocks are neither joined nor batched, however small: at a few tens of tokens the kernel takes nearly all of the time
already, and a joined block has more to compute.

B batch, A query heads, G key heads, Q query rows, K key rows, D head size.
"""

import torch
from torch import Tensor

from lightning_megatron.context.attention_step import AttentionGradients, AttentionStep, BackwardInputs, merge_, wide
from lightning_megatron.context.context_layout import AttentionBlock
from lightning_megatron.context.fused_attention import FusedAttention


class BlockwiseAttention:
    """The kernel that calls a fused kernel for each block."""

    def __init__(self, fused: FusedAttention) -> None:
        self.fused = fused

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, step: AttentionStep) -> tuple[Tensor, Tensor]:
        dtype = wide(queries.dtype)
        if _is_one(step.blocks, queries, keys):
            full, full_lse = self._forward(queries, keys, values, step, step.blocks[0])
            return full.to(dtype), full_lse
        output = torch.zeros(queries.shape, dtype=dtype, device=queries.device)
        lse = torch.full(queries.shape[:-1], -torch.inf, dtype=dtype, device=queries.device)
        is_written = bytearray(queries.shape[2])
        for block in step.blocks:
            rows, seen = _slices(block)
            part, part_lse = self._forward(queries[:, :, rows], keys[:, :, seen], values[:, :, seen], step, block)
            if 1 in is_written[rows]:
                merge_(output[:, :, rows], lse[:, :, rows], part, part_lse)
            else:
                output[:, :, rows], lse[:, :, rows] = part, part_lse
            is_written[rows] = b"\1" * block.num_queries
        return output, lse

    def _forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, step: AttentionStep, block: AttentionBlock
    ) -> tuple[Tensor, Tensor]:
        mask = step.mask(block, queries.dtype, queries.device) if block.kind == "masked" else None
        output, lse = self.fused.forward(
            queries, keys, values, block.kind == "causal", None if mask is None else mask.added, step.scale
        )
        if mask is not None:
            output, lse = output.masked_fill(mask.blind[:, None], 0.0), lse.masked_fill(mask.blind, -torch.inf)
        return output, lse

    def backward(self, inputs: BackwardInputs, step: AttentionStep) -> AttentionGradients:
        grad, queries, keys, values, output, lse = inputs
        dtype = wide(queries.dtype)
        # The weights of a row that sees no key become exp(score - inf), which is 0.
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        if _is_one(step.blocks, queries, keys):
            full = self._backward(inputs._replace(lse=lse), step, step.blocks[0])
            return AttentionGradients(full[0].to(dtype), full[1].to(dtype), full[2].to(dtype), None)
        sums = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (queries, keys, values)]
        for block in step.blocks:
            rows, seen = _slices(block)
            of_rows = (x[:, :, rows] for x in (grad, queries, output, lse))
            own_grad, own_queries, own_output, own_lse = of_rows
            own = BackwardInputs(own_grad, own_queries, keys[:, :, seen], values[:, :, seen], own_output, own_lse)
            parts = self._backward(own, step, block)
            for total, part, where in zip(sums, parts, (rows, seen, seen), strict=True):
                total[:, :, where] += part
        return AttentionGradients(sums[0], sums[1], sums[2], None)

    def _backward(
        self, inputs: BackwardInputs, step: AttentionStep, block: AttentionBlock
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries = inputs.queries
        mask = step.mask(block, queries.dtype, queries.device).added if block.kind == "masked" else None
        is_causal = block.kind == "causal"
        return self.fused.backward(inputs, is_causal, mask, step.scale)


def _slices(block: AttentionBlock) -> tuple[slice, slice]:
    """Slices of a block's query rows and key rows."""
    return (
        slice(block.query_row, block.query_row + block.num_queries),
        slice(block.key_row, block.key_row + block.num_keys),
    )


def _is_one(blocks: tuple[AttentionBlock, ...], queries: Tensor, keys: Tensor) -> bool:
    """Whether a single block takes all rows, so that its output needs no copy."""
    return len(blocks) == 1 and (blocks[0].num_queries, blocks[0].num_keys) == (queries.shape[2], keys.shape[2])
