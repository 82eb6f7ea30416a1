"""Unfused attention, which materialises scores a tile of queries at a time: for dropout and biases.

Everything is float32 or wider, and the backward recomputes the weights from the log-sum-exp.

B batch, A query heads, G key heads, R query heads of a key head, Q query rows, K key rows, D head size, T rows of a
tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.comm import rng
from lightning_megatron.context.attention_step import AttentionGradients, AttentionStep, BackwardInputs, merge_, wide
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
        for tile in _tiles(queries, step.blocks):
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
        for tile in _tiles(queries, step.blocks):
            weights = tile.scores(queries, keys, step).sub_(tile.rows(lse).unsqueeze(-1)).exp_()
            dropped = tile.dropped(step)
            grad_rows = tile.rows(grad).to(dtype)
            dropped_weights = weights if dropped is None else _drop_(weights.clone(), dropped, step)
            tile.keys_of(sums[2]).add_(_by_group(dropped_weights, groups).mT @ _by_group(grad_rows, groups))
            grad_weights = (_by_group(grad_rows, groups) @ tile.keys(values).mT).view(weights.shape)
            grad_scores = _drop_(grad_weights, dropped, step)
            grad_scores.sub_((grad_rows * tile.rows(output)).sum(dim=-1, keepdim=True)).mul_(weights)
            if step.bias is not None and table is not None:
                buckets = step.bias.bucket(tile.offsets(step, queries.device)).flatten()
                table.index_add_(0, buckets, grad_scores.sum(dim=0).flatten(1).mT)
            by_group = _by_group(grad_scores.mul_(step.scale), groups)
            tile.rows(sums[0]).add_((by_group @ tile.keys(keys)).view(grad_rows.shape))
            tile.keys_of(sums[1]).add_(by_group.mT @ _by_group(tile.rows(queries).to(dtype), groups))
        return AttentionGradients(sums[0], sums[1], sums[2], table)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some samples and queries of a block, with the keys that they see."""

    block: AttentionBlock
    samples: slice
    query_rows: slice
    key_rows: slice

    def rows(self, x: Tensor) -> Tensor:
        """This tile's part of [B, A, Q] or [B, A, Q, D]."""
        return x[self.samples, :, self.query_rows]

    def keys_of(self, x: Tensor) -> Tensor:
        """This tile's part of [B, G, K, D]."""
        return x[self.samples, :, self.key_rows]

    def keys(self, x: Tensor) -> Tensor:
        """This tile's part of keys or values, as wide as scores."""
        return self.keys_of(x).to(wide(x.dtype))

    def positions(self, step: AttentionStep, device: torch.device) -> tuple[Tensor, Tensor]:
        """Positions of this tile's queries and keys."""
        query_positions, key_positions = step.positions_on(device)
        return query_positions[self.query_rows], key_positions[self.key_rows]

    def offsets(self, step: AttentionStep, device: torch.device) -> Tensor:
        """Position of each key (column) minus that of each query (row)."""
        query_positions, key_positions = self.positions(step, device)
        return key_positions - query_positions[:, None]

    def scores(self, queries: Tensor, keys: Tensor, step: AttentionStep) -> Tensor:
        """Scores [b, A, T, K] with the bias, -inf where a key is not seen."""
        rows = self.rows(queries).to(wide(queries.dtype))
        scores = _by_group(rows, keys.shape[1]) @ self.keys(keys).mT
        scores = scores.view(*rows.shape[:3], -1).mul_(step.scale)
        if step.bias is not None:
            scores += step.bias.table.detach()[step.bias.bucket(self.offsets(step, scores.device))].permute(2, 0, 1)
        if self.block.kind != "full":
            scores.masked_fill_(~step.mask_spec.is_visible(*self.positions(step, scores.device)), -torch.inf)
        return scores

    def dropped(self, step: AttentionStep) -> Tensor | None:
        """Mask of dropped weights: bool [b or 1, A, T, K]."""
        dropout_keys = step.dropout_keys
        if dropout_keys is None:
            return None
        keys = dropout_keys.keys[self.samples if dropout_keys.keys.shape[0] > 1 else slice(None), :, self.query_rows]
        return ~rng.keep_columns(keys, self.positions(step, keys.device)[1], dropout_keys.probability)


def _tiles(queries: Tensor, blocks: tuple[AttentionBlock, ...]) -> Iterator[_Tile]:
    """All blocks, in tiles of at most MOST_SCORES scores, or of MOST_GPU_SCORES."""
    batch, heads = queries.shape[:2]
    most = MOST_SCORES if queries.device.type == "cpu" else MOST_GPU_SCORES
    for block in blocks:
        num_rows = min(block.num_queries, max(1, most // (heads * block.num_keys)))
        num_samples = max(1, most // (heads * block.num_keys * num_rows))
        end = block.query_row + block.num_queries
        for sample in range(0, batch, num_samples):
            for row in range(block.query_row, end, num_rows):
                rows = slice(row, min(row + num_rows, end))
                # A tile of a causal block has only the keys that some of its queries see.
                num_keys = rows.stop - block.query_row if block.kind == "causal" else block.num_keys
                seen = slice(block.key_row, block.key_row + num_keys)
                yield _Tile(block, slice(sample, sample + num_samples), rows, seen)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """View of [b, A, T, ...] as [b, G, R * T, ...]: query heads of a key head become rows, and no key is repeated."""
    return x.reshape(x.shape[0], groups, -1, x.shape[-1])


def _drop_(weights: Tensor, dropped: Tensor | None, step: AttentionStep) -> Tensor:
    """Weights, or their gradients, with dropped ones at 0 and the rest scaled; in place."""
    if dropped is None or step.dropout_keys is None:
        return weights
    return weights.masked_fill_(dropped, 0.0).div_(1.0 - step.dropout_keys.probability)
