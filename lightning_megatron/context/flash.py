"""Attention of many blocks by few calls of CUDA's variable-length (varlen) flash attention.

A call takes blocks with equal bounds. Bounds count from the end of a block, as if the last query and the last key stood
at one position: query i of Q sees the keys from i + K - Q - `left` to i + K - Q + `right`, -1 for no bound. A mask
that bounds cannot express is computed blockwise.

B batch, A query heads, G key heads, Q query rows, K key rows, D head size, T tokens of a call.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_megatron.context.attention_step import AttentionGradients, AttentionStep, BackwardInputs, merge_, wide
from lightning_megatron.context.blockwise_attention import BlockwiseAttention
from lightning_megatron.context.context_layout import AttentionBlock
from lightning_megatron.context.fused_attention import FusedAttention, MemoryEfficientAttention


class Bounds(NamedTuple):
    """Keys that a query sees before and after the key at its position."""

    left: int
    right: int


FULL, CAUSAL = Bounds(-1, -1), Bounds(-1, 0)


@dataclass(frozen=True, eq=False)
class VarlenSequences:
    """Blocks of one varlen call, of all samples, one after the other."""

    query_starts: Tensor
    """Offset of each block and the end of the last: int32."""
    key_starts: Tensor
    most_queries: int
    most_keys: int
    """Most keys of a block."""
    bounds: Bounds


class FlashVarlen:
    """CUDA's varlen flash attention, in 16 bits: queries [T, A, D], keys and values [T, G, D]."""

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, sequences: VarlenSequences, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [T, A, D] and log-sum-exp [A, T], which is inf for a query that sees no key."""
        operation = partial(torch.ops.aten._flash_attention_forward, queries, keys, values)
        output, lse, *_ = _run(operation, sequences, scale, False)
        return output, lse

    def backward(
        self, inputs: BackwardInputs, sequences: VarlenSequences, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values; a query whose log-sum-exp is inf adds nothing."""
        unused = [torch.zeros(size, dtype=torch.uint64, device=inputs.lse.device) for size in (2, 0)]
        operation = partial(torch.ops.aten._flash_attention_backward, *inputs)
        grads: tuple[Tensor, Tensor, Tensor] = _run(operation, sequences, scale, *unused)
        return grads


def _run(operation: Callable[..., Any], sequences: VarlenSequences, scale: float, *more: Any) -> Any:
    """Output of an operation without dropout; `more` are its arguments after the causal flag."""
    return operation(
        sequences.query_starts,
        sequences.key_starts,
        sequences.most_queries,
        sequences.most_keys,
        0.0,
        sequences.bounds == CAUSAL,
        *more,
        scale=scale,
        window_size_left=sequences.bounds.left,
        window_size_right=sequences.bounds.right,
    )


class FlashAttention:
    """The kernel that runs most blocks by varlen calls, and masked ones blockwise."""

    def __init__(self, varlen: FlashVarlen | None = None, fused: FusedAttention | None = None) -> None:
        self.varlen = FlashVarlen() if varlen is None else varlen
        self.blockwise = BlockwiseAttention(MemoryEfficientAttention() if fused is None else fused)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, step: AttentionStep) -> tuple[Tensor, Tensor]:
        calls, rest = _plan(step, queries, keys)
        dtype, batch = wide(queries.dtype), queries.shape[0]
        output, lse = self.blockwise.forward(queries, keys, values, rest)
        for call in calls:
            rows, seen = call.query_rows, call.key_rows
            part, part_lse = self.varlen.forward(
                _pick(queries, rows), _pick(keys, seen), _pick(values, seen), call.sequences, step.scale
            )
            part = _as_heads(part, batch).to(dtype)
            part_lse = part_lse.unflatten(1, (batch, -1)).transpose(0, 1).to(dtype)
            part_lse = part_lse.masked_fill(part_lse == torch.inf, -torch.inf)
            merge_(part, part_lse, output[:, :, rows], lse[:, :, rows])
            output[:, :, rows], lse[:, :, rows] = part, part_lse
        return output, lse

    def backward(self, inputs: BackwardInputs, step: AttentionStep) -> AttentionGradients:
        grad, queries, keys, values, output, lse = inputs
        calls, rest = _plan(step, queries, keys)
        sums = self.blockwise.backward(inputs, rest)
        grad, output = grad.to(queries.dtype), output.to(queries.dtype)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        for call in calls:
            rows, seen = call.query_rows, call.key_rows
            picked = BackwardInputs(
                _pick(grad, rows),
                _pick(queries, rows),
                _pick(keys, seen),
                _pick(values, seen),
                _pick(output, rows),
                lse[:, :, rows].transpose(0, 1).flatten(1).contiguous(),
            )
            parts = self.varlen.backward(picked, call.sequences, step.scale)
            # No row is in a call twice, so that sums have one order.
            for total, part, where in zip(sums[:3], parts, (rows, seen, seen), strict=True):
                total[:, :, where] += _as_heads(part, queries.shape[0])
        return sums


@dataclass(frozen=True, eq=False)
class _Call:
    query_rows: Tensor | slice
    key_rows: Tensor | slice
    sequences: VarlenSequences


def _pick(x: Tensor, rows: Tensor | slice) -> Tensor:
    """Selected rows of [B, A, Q, D], sample by sample: [T, A, D]."""
    picked: Tensor = x.transpose(1, 2)[:, rows]
    return picked.flatten(0, 1)


def _as_heads(x: Tensor, batch: int) -> Tensor:
    """View of [T, A, D] as [B, A, Q, D]."""
    samples: Tensor = x.unflatten(0, (batch, -1))
    return samples.transpose(1, 2)


def _plan(step: AttentionStep, queries: Tensor, keys: Tensor) -> tuple[list[_Call], AttentionStep]:
    """Varlen calls of a step, and the step of the remaining blocks."""
    name = ("flash", queries.shape[0])
    if name not in step.cache:
        pending: dict[Bounds, list[_Pending]] = {}
        masked: list[AttentionBlock] = []
        for block in step.blocks:
            for part, bounds in _bounded(block, step):
                if bounds is None:
                    masked.append(part)
                else:
                    _put(part, pending.setdefault(bounds, []), queries.shape[2], keys.shape[2])
        calls = [
            _make_call(one.blocks, bounds, queries, keys) for bounds, several in pending.items() for one in several
        ]
        step.cache[name] = calls, tuple(masked)
    calls, rest = step.cache[name]
    # Steps share the cache: in it, a step would hold itself, and its masks until cycles are looked for.
    return calls, replace(step, blocks=rest)


def _bounded(block: AttentionBlock, step: AttentionStep) -> Iterator[tuple[AttentionBlock, Bounds | None]]:
    """Parts of a block with their bounds, None where bounds cannot express the mask."""
    if block.kind != "masked":
        yield block, CAUSAL if block.kind == "causal" else FULL
        return
    # The first part ends with the query at the position of the last key that any query sees.
    distance, window = step.distance(block), step.mask_spec.window
    num_keys = min(block.num_keys, block.num_queries + distance)
    num_within = min(max(0, num_keys - distance), block.num_queries)
    if num_within:
        within = AttentionBlock(block.query_row, num_within, block.key_row, num_keys, "masked")
        yield within, Bounds(window - 1 if window else -1, 0)
    if num_within < block.num_queries:
        num_after, row = block.num_queries - num_within, block.query_row + num_within
        if window:
            yield AttentionBlock(row, num_after, block.key_row, num_keys, "masked"), None
        else:
            yield AttentionBlock(row, num_after, block.key_row, num_keys, "full"), FULL


@dataclass(frozen=True)
class _Pending:
    """Blocks of a call in the making, which share no row."""

    has_query: bytearray
    has_key: bytearray
    blocks: list[AttentionBlock] = field(default_factory=list)


def _put(block: AttentionBlock, calls: list[_Pending], num_queries: int, num_keys: int) -> None:
    """Adds a block to the first call without any of its rows, or to a new one."""
    rows = slice(block.query_row, block.query_row + block.num_queries)
    seen = slice(block.key_row, block.key_row + block.num_keys)
    call = next((call for call in calls if 1 not in call.has_query[rows] and 1 not in call.has_key[seen]), None)
    if call is None:
        call = _Pending(bytearray(num_queries), bytearray(num_keys))
        calls.append(call)
    call.has_query[rows] = b"\1" * block.num_queries
    call.has_key[seen] = b"\1" * block.num_keys
    call.blocks.append(block)


def _make_call(blocks: list[AttentionBlock], bounds: Bounds, queries: Tensor, keys: Tensor) -> _Call:
    batch = queries.shape[0]
    query_runs = [(block.query_row, block.num_queries) for block in blocks]
    key_runs = [(block.key_row, block.num_keys) for block in blocks]
    nums_of_queries, nums_of_keys = ([num for _, num in runs] for runs in (query_runs, key_runs))
    query_starts = _starts(nums_of_queries, batch, queries.device)
    # Blocks of self-attention are square, and one copy to the device serves both.
    key_starts = query_starts if nums_of_keys == nums_of_queries else _starts(nums_of_keys, batch, queries.device)
    sequences = VarlenSequences(query_starts, key_starts, max(nums_of_queries), max(nums_of_keys), bounds)
    return _Call(_rows(query_runs, queries), _rows(key_runs, keys), sequences)


def _starts(nums: list[int], batch: int, device: torch.device) -> Tensor:
    starts = torch.tensor(nums, dtype=torch.int32).repeat(batch).cumsum(0, dtype=torch.int32)
    return torch.nn.functional.pad(starts, (1, 0)).to(device, non_blocking=True)


def _rows(runs: list[tuple[int, int]], x: Tensor) -> Tensor | slice:
    """Row indices of runs of [B, A, Q, D]; all rows in order need no copy."""
    rows = torch.cat([torch.arange(row, row + num) for row, num in runs])
    is_all = rows.numel() == x.shape[2] and bool((rows[1:] > rows[:-1]).all())
    return slice(None) if is_all else rows.to(x.device, non_blocking=True)
