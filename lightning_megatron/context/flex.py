"""Attention by torch's FlexAttention, which compiles a kernel with biases and masks in it.

Its backward does not take output and log-sum-exp over all keys when it computed one step. So the backward
here recomputes the step, and passes the gradients of its output and of its log-sum-exp:

    output = sum over parts of w * part             w = exp(lse of the part - lse over all keys), for each query
    d part = w * d output
    d lse of the part = w * <d output, part - output>

Dropout of attention weights is a mask of keys, drawn where a score is made. What it drops counts in the log-sum-exp all
the same, so that a second call without dropout computes that; then w = exp(lse of the kept - lse over all keys) /
(1 - probability), and <d output, output> is a gradient of the second call's log-sum-exp.

B batch, A query heads, G key heads, Q query rows, K key rows, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    create_block_mask,
    flex_attention,
)

from lightning_megatron.comm import rng
from lightning_megatron.comm.host_numbers import on_device
from lightning_megatron.context.attention_step import (
    AttentionGradients,
    AttentionStep,
    BackwardInputs,
    DropoutKeys,
    wide,
)
from lightning_megatron.context.context_layout import AttentionBlock

LEAST_HEAD_DIM = 16
"""Smallest head size of its kernels on CUDA. Source: torch 2.13, `torch/_inductor/kernel/flex`."""

_NO_QUERY, _NO_KEY = -1, -2
# Its kernel for few queries would need a power of 2 of query heads for each key head.
_OPTIONS: FlexKernelOptions = {"FORCE_USE_FLEX_ATTENTION": True}


class FlexAttention:
    """The kernel that takes all blocks at once by `attention`; None is torch's `flex_attention`, compiled."""

    def __init__(self, attention: Callable[..., Any] | None = None) -> None:
        self.attention = _compiled() if attention is None else attention

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, step: AttentionStep) -> tuple[Tensor, Tensor]:
        table = None if step.bias is None else step.bias.table
        inputs = queries.detach(), keys.detach(), values.detach(), table
        output, lse = (x.to(wide(queries.dtype)) for x in self._part(*inputs, step))
        if step.dropout_keys is not None:
            kept_lse, lse = lse, self._part(*inputs, replace(step, dropout_keys=None))[1].to(lse.dtype)
            output = output * _weights(kept_lse, lse, step)
        return output, lse

    def backward(self, inputs: BackwardInputs, step: AttentionStep) -> AttentionGradients:
        grad, queries, keys, values, output, lse = inputs
        dtype = wide(queries.dtype)
        queries, keys, values = (x.detach().requires_grad_() for x in (queries, keys, values))
        table = None if step.bias is None else step.bias.table.detach().requires_grad_()
        without_dropout = replace(step, dropout_keys=None)
        with torch.enable_grad():
            part, part_lse = self._part(queries, keys, values, table, step)
            # Its output has no gradient.
            lses = [part_lse]
            if step.dropout_keys is not None:
                lses.append(self._part(queries, keys, values, table, without_dropout)[1])
        grad_part = _weights(part_lse.detach().to(dtype), lse, step) * grad
        # With one call both terms are those of its log-sum-exp: as a difference they cancel without rounding.
        if step.dropout_keys is None:
            grad_lses = [(grad_part * (part.detach().to(dtype) - output)).sum(dim=-1)]
        else:
            of_all = _weights(lses[1].detach().to(dtype), lse, without_dropout)
            grad_lses = [(grad_part * part.detach().to(dtype)).sum(dim=-1), -(of_all * grad * output).sum(dim=-1)]
        found = torch.autograd.grad(
            (part, *lses),
            (queries, keys, values) if table is None else (queries, keys, values, table),
            (grad_part.to(part.dtype), *(one.to(part_lse.dtype) for one in grad_lses)),
        )
        of_queries, of_keys, of_values, *of_table = (x.to(dtype) for x in found)
        return AttentionGradients(of_queries, of_keys, of_values, of_table[0] if of_table else None)

    def _part(
        self, queries: Tensor, keys: Tensor, values: Tensor, table: Tensor | None, step: AttentionStep
    ) -> tuple[Tensor, Tensor]:
        sight = _sight_of(step, queries, keys)
        output, more = self.attention(
            queries,
            keys,
            values,
            score_mod=sight.modified(table, step),
            block_mask=sight.mask,
            scale=step.scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
            kernel_options=_OPTIONS,
            return_aux=AuxRequest(lse=True),
        )
        return output, more.lse


def _weights(part_lse: Tensor, lse: Tensor, step: AttentionStep) -> Tensor:
    """What the attention to some keys counts in that to all, by their log-sum-exp: [B, A, Q, 1]."""
    # A query that sees no key has weight exp(-inf - inf), which is 0.
    weights = (part_lse - lse.masked_fill(lse == -torch.inf, torch.inf)).exp().unsqueeze(-1)
    return weights if step.dropout_keys is None else weights / (1.0 - step.dropout_keys.probability)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sight:
    """Mask of a step in FlexAttention's terms."""

    mask: BlockMask
    furthest: int
    """Largest distance of a key from a query."""

    def modified(self, table: Tensor | None, step: AttentionStep) -> Callable[..., Tensor] | None:
        """Score modification that adds the bias, and drops keys; None where a step has neither."""
        biased = _capped(step.softcap) if table is None else self._biased(table, step)
        return biased if step.dropout_keys is None else self._dropped(biased, step, step.dropout_keys)

    def _biased(self, table: Tensor, step: AttentionStep) -> Callable[..., Tensor]:
        bias, furthest = step.bias, self.furthest
        assert bias is not None
        queries, keys = step.positions_on(table.device)
        buckets = bias.bucket(torch.arange(-furthest, furthest + 1, device=table.device))

        def add(score: Tensor, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + table[buckets[keys[key] - queries[query] + furthest], head]

        return add

    def _dropped(
        self, biased: Callable[..., Tensor] | None, step: AttentionStep, dropout_keys: DropoutKeys
    ) -> Callable[..., Tensor]:
        rows, probability = dropout_keys.keys, dropout_keys.probability
        columns, has_samples = step.positions_on(rows.device)[1], rows.shape[0] > 1

        def drop(score: Tensor, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            of_row = rows[sample, head, query] if has_samples else rows[0, head, query]
            keep = rng.keeps(of_row, columns[key], probability)
            modified = score if biased is None else biased(score, sample, head, query, key)
            return torch.where(keep, modified, -torch.inf)

        return drop


def _capped(softcap: float) -> Callable[..., Tensor] | None:
    if not softcap:
        return None

    def cap(score: Tensor, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _sight_of(step: AttentionStep, queries: Tensor, keys: Tensor) -> _Sight:
    if "flex" not in step.cache:
        step.cache["flex"] = _make_sight(step, queries.shape[2], keys.shape[2], queries.device)
    sight: _Sight = step.cache["flex"]
    return sight


def _make_sight(step: AttentionStep, num_queries: int, num_keys: int, device: torch.device) -> _Sight:
    mask_spec = step.mask_spec
    query_positions, key_positions = step.positions_on(device)
    query_segments, key_segments = (
        on_device(numbers, device, torch.int32) for numbers in _segments(step.blocks, num_queries, num_keys)
    )

    def sees(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query_positions[query] - key_positions[key]
        return (query_segments[query] == key_segments[key]) & mask_spec.sees(distance)

    on_gpu = device.type == "cuda"
    # Without compilation the mask of all pairs of rows would be materialised.
    mask = create_block_mask(sees, None, None, num_queries, num_keys, device=device, _compile=on_gpu)
    # Rows that hold no token have the position -1.
    return _Sight(mask=mask, furthest=int(max(step.query_positions.max(), step.key_positions.max())) + 1)


def _segments(blocks: tuple[AttentionBlock, ...], num_queries: int, num_keys: int) -> tuple[list[int], list[int]]:
    """Number of each query row and key row, equal where blocks join them. Blocks of two segments share no row, and rows
    that no blocks join do not see each other."""
    queries, keys = [_NO_QUERY] * num_queries, [_NO_KEY] * num_keys
    for number, block in enumerate(blocks):
        rows = slice(block.query_row, block.query_row + block.num_queries)
        seen = slice(block.key_row, block.key_row + block.num_keys)
        met = ({*queries[rows]} | {*keys[seen]}) - {_NO_QUERY, _NO_KEY}
        if met:
            queries = [number if one in met else one for one in queries]
            keys = [number if one in met else one for one in keys]
        queries[rows], keys[seen] = [number] * block.num_queries, [number] * block.num_keys
    return queries, keys
