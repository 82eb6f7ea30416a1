"""Attention block by block, through a product that computes one rectangle of queries and keys.

Blocks are not joined and not batched, however small: at a few tens of tokens the product itself takes nearly all of the
time already, and a joined block has more to compute.

B batch, A query heads, G key heads, Q query rows, K key rows, D head size.
"""

import torch
from torch import Tensor

from lightning_megatron.context.layout import Block
from lightning_megatron.context.pairing import Gradients, Pairing, merge_, wide
from lightning_megatron.context.product import Product


class ByBlocks:
    """The kernel that does each block by a product of its own."""

    def __init__(self, product: Product) -> None:
        self.product = product

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, pairing: Pairing) -> tuple[Tensor, Tensor]:
        dtype = wide(queries.dtype)
        if _is_one(pairing.blocks, queries, keys):
            whole, whole_lse = self._forward(queries, keys, values, pairing, pairing.blocks[0])
            return whole.to(dtype), whole_lse
        output = torch.zeros(queries.shape, dtype=dtype, device=queries.device)
        lse = torch.full(queries.shape[:-1], -torch.inf, dtype=dtype, device=queries.device)
        is_written = bytearray(queries.shape[2])
        for block in pairing.blocks:
            rows, seen = _slices(block)
            part, part_lse = self._forward(queries[:, :, rows], keys[:, :, seen], values[:, :, seen], pairing, block)
            if 1 in is_written[rows]:
                merge_(output[:, :, rows], lse[:, :, rows], part, part_lse)
            else:
                output[:, :, rows], lse[:, :, rows] = part, part_lse
            is_written[rows] = b"\1" * block.num_queries
        return output, lse

    def _forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, pairing: Pairing, block: Block
    ) -> tuple[Tensor, Tensor]:
        mask = pairing.mask(block, queries.dtype) if block.kind == "masked" else None
        output, lse = self.product.forward(
            queries, keys, values, block.kind == "causal", None if mask is None else mask.added, pairing.scale
        )
        if mask is not None and mask.blind is not None:
            output, lse = output.masked_fill(mask.blind[:, None], 0.0), lse.masked_fill(mask.blind, -torch.inf)
        return output, lse

    def backward(
        self,
        grad: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        lse: Tensor,
        pairing: Pairing,
    ) -> Gradients:
        dtype = wide(queries.dtype)
        # The weights of such a row come out as exp(score - inf), which is 0.
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        if _is_one(pairing.blocks, queries, keys):
            whole = self._backward(grad, queries, keys, values, output, lse, pairing, pairing.blocks[0])
            return Gradients(whole[0].to(dtype), whole[1].to(dtype), whole[2].to(dtype), None)
        sums = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (queries, keys, values)]
        for block in pairing.blocks:
            rows, seen = _slices(block)
            parts = self._backward(
                grad[:, :, rows],
                queries[:, :, rows],
                keys[:, :, seen],
                values[:, :, seen],
                output[:, :, rows],
                lse[:, :, rows],
                pairing,
                block,
            )
            for total, part, where in zip(sums, parts, (rows, seen, seen), strict=True):
                total[:, :, where] += part
        return Gradients(sums[0], sums[1], sums[2], None)

    def _backward(
        self,
        grad: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        lse: Tensor,
        pairing: Pairing,
        block: Block,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask = pairing.mask(block, queries.dtype).added if block.kind == "masked" else None
        is_causal = block.kind == "causal"
        return self.product.backward(grad, queries, keys, values, output, lse, is_causal, mask, pairing.scale)


def _slices(block: Block) -> tuple[slice, slice]:
    """A block's rows of queries and of keys."""
    return (
        slice(block.query_row, block.query_row + block.num_queries),
        slice(block.key_row, block.key_row + block.num_keys),
    )


def _is_one(blocks: tuple[Block, ...], queries: Tensor, keys: Tensor) -> bool:
    """A single block takes all rows: what it gives needs no other place."""
    return len(blocks) == 1 and (blocks[0].num_queries, blocks[0].num_keys) == (queries.shape[2], keys.shape[2])
