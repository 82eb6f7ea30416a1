"""Unfused attention, which materialises scores a tile of queries at a time: for dropout, biases and soft caps.

Everything is float32 or wider, and the backward recomputes the weights from the log-sum-exp.

B batch, A query heads, G key heads, R query heads of a key head, Q query rows, K key rows, D head size, T rows of a
tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_megatron.comm import rng
from lightning_megatron.context.attention_step import (
    AttentionGradients,
    AttentionStep,
    BackwardInputs,
    capped_,
    merge_,
    wide,
)
from lightning_megatron.context.context_layout import AttentionBlock

# Number of scores of a tile: those that a CPU's caches hold; a GPU passes over so few in less time than a launch takes.
# With the int64 draws of a mask its scratch is some 100 MB.
MOST_SCORES, MOST_GPU_SCORES = 1 << 20, 1 << 23


class UnfusedAttention:
    """The kernel that runs on any device and supports everything."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, step: AttentionStep) -> tuple[Tensor, Tensor]:
        dtype, groups = wide(queries.dtype), keys.shape[1]
        output = torch.zeros(queries.shape, dtype=dtype, device=queries.device)
        lse = torch.full(queries.shape[:-1], -torch.inf, dtype=dtype, device=queries.device)
        for tile in _tiles(queries, step):
            scores = tile.scores(queries, keys, step)
            # In a row that sees no key -inf minus -inf would be nan.
            peak = scores.amax(dim=-1).nan_to_num(neginf=0.0)
            weights = scores.sub_(peak.unsqueeze(-1)).exp_()
            total = weights.sum(dim=-1)
            weights.div_(total.masked_fill(total == 0.0, 1.0).unsqueeze(-1))
            weights = _drop_(weights, tile.dropped(step), step)
            part = _by_group(weights, groups) @ tile.keys(values)
            merge_(tile.rows(output), tile.rows(lse), part.view(*weights.shape[:3], -1), peak + total.log())
        return output, lse

    def backward(self, inputs: BackwardInputs, step: AttentionStep) -> AttentionGradients:
        grad, queries, keys, values, output, lse = inputs
        dtype, groups = wide(queries.dtype), keys.shape[1]
        sums = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (queries, keys, values)]
        table = None if step.bias is None else torch.zeros_like(step.bias.table, dtype=dtype)
        # The weights of a row that sees no key become exp(score - inf), which is 0.
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        for tile in _tiles(queries, step):
            scores = tile.scores(queries, keys, step)
            slopes = _slopes(scores, step.softcap)
            weights = scores.sub_(tile.rows(lse).unsqueeze(-1)).exp_()
            dropped = tile.dropped(step)
            grad_rows = tile.rows(grad).to(dtype)
            dropped_weights = weights if dropped is None else _drop_(weights.clone(), dropped, step)
            tile.keys_of(sums[2]).add_(_by_group(dropped_weights, groups).mT @ _by_group(grad_rows, groups))
            grad_weights = (_by_group(grad_rows, groups) @ tile.keys(values).mT).view(weights.shape)
            grad_scores = _drop_(grad_weights, dropped, step)
            grad_scores.sub_((grad_rows * tile.rows(output)).sum(dim=-1, keepdim=True)).mul_(weights)
            if table is not None and tile.shared.buckets is not None:
                table.index_add_(0, tile.shared.buckets.flatten(), grad_scores.sum(dim=0).flatten(1).mT)
            if slopes is not None:
                grad_scores.mul_(slopes)
            by_group = _by_group(grad_scores.mul_(step.scale), groups)
            tile.rows(sums[0]).add_((by_group @ tile.keys(keys)).view(grad_rows.shape))
            tile.keys_of(sums[1]).add_(by_group.mT @ _by_group(tile.rows(queries).to(dtype), groups))
        return AttentionGradients(sums[0], sums[1], sums[2], table)


class _Stack(NamedTuple):
    """Blocks of one shape and of the same positions whose rows follow one another: they are taken as samples."""

    first: AttentionBlock
    num: int

    def queries_of(self, x: Tensor) -> Tensor:
        """Rows of queries, of [B, A, Q, ...]: view [B, A, T, ...], or of several blocks [num, A, T, ...]."""
        return self._rows_of(x, self.first.query_row, self.first.num_queries)

    def keys_of(self, x: Tensor) -> Tensor:
        """Rows of keys, of [B, G, K, ...], likewise."""
        return self._rows_of(x, self.first.key_row, self.first.num_keys)

    def _rows_of(self, x: Tensor, row: int, num_rows: int) -> Tensor:
        rows = x[:, :, row : row + self.num * num_rows]
        return rows if self.num == 1 else rows[0].unflatten(1, (self.num, num_rows)).transpose(0, 1)


def _stacks(step: AttentionStep, batch: int) -> list[_Stack]:
    """All blocks, as few stacks. Blocks of several samples are batches already: they are not stacked."""
    if batch != 1:
        return [_Stack(block, 1) for block in step.blocks]
    name = ("stacks", step.blocks)
    if name not in step.cache:
        stacks: list[_Stack] = []
        for block in step.blocks:
            if stacks and _is_next(stacks[-1], block, step):
                stacks[-1] = stacks[-1]._replace(num=stacks[-1].num + 1)
            else:
                stacks.append(_Stack(block, 1))
        step.cache[name] = stacks
    found: list[_Stack] = step.cache[name]
    return found


def _is_next(stack: _Stack, block: AttentionBlock, step: AttentionStep) -> bool:
    first, num = stack
    follower = replace(
        first, query_row=first.query_row + num * first.num_queries, key_row=first.key_row + num * first.num_keys
    )
    return block == follower and all(
        positions[one:][:length].equal(positions[other:][:length])
        for positions, one, other, length in (
            (step.query_positions, first.query_row, block.query_row, block.num_queries),
            (step.key_positions, first.key_row, block.key_row, block.num_keys),
        )
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some queries of the blocks of a stack and the keys that they see: what tiles of different samples share."""

    stack: _Stack
    rows: slice
    """Queries, counted within a block."""
    num_keys: int
    """Number of keys that some query sees: the first ones of a block."""
    key_positions: Tensor
    hidden: Tensor | None
    """Keys that a query does not see: bool [T, K]; None where each sees all."""
    buckets: Tensor | None
    """Bucket of each distance, int64 [T, K], where there is a bias."""
    bias: Tensor | None
    """Added to scores: [A, T, K]."""

    @classmethod
    def of(cls, step: AttentionStep, stack: _Stack, rows: slice, device: torch.device) -> "_Rows":
        block = stack.first
        num_keys = rows.stop if block.kind == "causal" else block.num_keys
        query_positions, key_positions = step.positions_on(device)
        query_positions = query_positions[block.query_row + rows.start : block.query_row + rows.stop]
        key_positions = key_positions[block.key_row : block.key_row + num_keys]
        hidden = None if block.kind == "full" else ~step.mask_spec.is_visible(query_positions, key_positions)
        buckets = bias = None
        if step.bias is not None:
            buckets = step.bias.bucket(key_positions - query_positions[:, None])
            bias = step.bias.table.detach()[buckets].permute(2, 0, 1)
        return cls(stack, rows, num_keys, key_positions, hidden, buckets, bias)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some samples of some rows."""

    samples: slice
    shared: _Rows

    def rows(self, x: Tensor) -> Tensor:
        """This tile's part of [B, A, Q] or [B, A, Q, D]."""
        return self.shared.stack.queries_of(x)[self.samples, :, self.shared.rows]

    def keys_of(self, x: Tensor) -> Tensor:
        """This tile's part of [B, G, K, D]."""
        return self.shared.stack.keys_of(x)[self.samples, :, : self.shared.num_keys]

    def keys(self, x: Tensor) -> Tensor:
        """This tile's part of keys or values, as wide as scores."""
        return self.keys_of(x).to(wide(x.dtype))

    def scores(self, queries: Tensor, keys: Tensor, step: AttentionStep) -> Tensor:
        """Scores [b, A, T, K] with the bias, -inf where a key is not seen."""
        rows = self.rows(queries).to(wide(queries.dtype))
        scores = _by_group(rows, keys.shape[1]) @ self.keys(keys).mT
        scores = capped_(scores.view(*rows.shape[:3], -1).mul_(step.scale), step.softcap)
        if self.shared.bias is not None:
            scores += self.shared.bias
        if self.shared.hidden is not None:
            scores.masked_fill_(self.shared.hidden, -torch.inf)
        return scores

    def dropped(self, step: AttentionStep) -> Tensor | None:
        """Mask of dropped weights: bool [b or 1, A, T, K]."""
        dropout_keys = step.dropout_keys
        if dropout_keys is None:
            return None
        keys = self.shared.stack.queries_of(dropout_keys.keys)
        keys = keys[self.samples if len(keys) > 1 else slice(None), :, self.shared.rows]
        return ~rng.keep_columns(keys, self.shared.key_positions, dropout_keys.probability)


def _slopes(scores: Tensor, softcap: float) -> Tensor | None:
    """Derivatives of scores by what they were before their cap; 0 where a key is not seen, None without a cap."""
    if not softcap:
        return None
    return scores.div(softcap).square_().neg_().add_(1.0).clamp_(min=0.0)


def _tiles(queries: Tensor, step: AttentionStep) -> Iterator[_Tile]:
    """All blocks, in tiles of at most MOST_SCORES scores, or of MOST_GPU_SCORES."""
    batch, heads = queries.shape[:2]
    most = MOST_SCORES if queries.device.type == "cpu" else MOST_GPU_SCORES
    for stack in _stacks(step, batch):
        num_queries, num_keys = stack.first.num_queries, stack.first.num_keys
        num_rows = min(num_queries, max(1, most // (heads * num_keys)))
        num_samples = max(1, most // (heads * num_keys * num_rows))
        for row in range(0, num_queries, num_rows):
            shared = _Rows.of(step, stack, slice(row, min(row + num_rows, num_queries)), queries.device)
            for sample in range(0, batch * stack.num, num_samples):
                yield _Tile(slice(sample, sample + num_samples), shared)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """View of [b, A, T, ...] as [b, G, R * T, ...]: query heads of a key head become rows, and no key is repeated."""
    return x.reshape(x.shape[0], groups, -1, x.shape[-1])


def _drop_(weights: Tensor, dropped: Tensor | None, step: AttentionStep) -> Tensor:
    """Weights, or their gradients, with dropped ones at 0 and the rest scaled; in place."""
    if dropped is None or step.dropout_keys is None:
        return weights
    return weights.masked_fill_(dropped, 0.0).div_(1.0 - step.dropout_keys.probability)
