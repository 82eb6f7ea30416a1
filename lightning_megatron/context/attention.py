"""Context-parallel attention: over tokens that several ranks share, within documents that share a stream.

    queries, keys, values of this rank's tokens, all heads here
        -> Ulysses: all-to-all, to the tokens of the group, some of the heads
        -> ring: keys and values of every group arrive in turn; partial attention is merged by its log-sum-exp
        -> Ulysses: all-to-all back
    output of this rank's tokens, all heads here

B batch, A query heads here, G key groups here, N tokens of this rank, Q tokens of the group, D head size, T tokens of
the full stream.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.comm import rng
from lightning_megatron.comm.differentiable import all_to_all
from lightning_megatron.context.attention_step import (
    AttentionStep,
    BackwardInputs,
    DropoutKeys,
    RelativePositionBias,
    merge_,
)
from lightning_megatron.context.context_layout import ContextLayout, MaskSpec
from lightning_megatron.context.cross_attention_layout import CrossAttentionLayout
from lightning_megatron.context.kernel import kernel_for
from lightning_megatron.context.key_value_exchange import KeyValueExchange, RingExchange
from lightning_megatron.mesh import AttentionKernel, Axis
from lightning_megatron.precision.autocast import autocast, autocast_dtype

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class ContextAxes:
    """The axes of ranks that share a call's tokens."""

    ring: Axis
    """Axis of groups, which exchange keys and values."""
    ulysses: Axis
    """Axis of the ranks of a group, which exchange heads for tokens."""
    exchange: KeyValueExchange = field(default_factory=RingExchange)
    """Way in which groups exchange keys and values over the ring axis."""
    kernel: AttentionKernel = "fused"
    """Attention kernel on CUDA."""

    @property
    def rank(self) -> int:
        """Rank among all ranks that share the tokens."""
        return self.ring.rank * self.ulysses.size + self.ulysses.rank


@dataclass(frozen=True, kw_only=True)
class DropoutSpec:
    """Dropout of one layer's attention weights."""

    keys_BT: Tensor
    """Random key of each token of the full stream: int64."""
    name_key: int
    """Random key of the layer's name."""
    first_head: int
    """Index of the first head here among all heads of the model."""
    probability: float

    def dropout_keys(self, indices: Tensor, ulysses: Axis, num_heads: int) -> DropoutKeys:
        """Dropout keys of the tokens with these indices in the stream, for this Ulysses rank's share of the heads."""
        num_own = num_heads // ulysses.size
        first = self.first_head + ulysses.rank * num_own
        heads_A = torch.arange(first, first + num_own, device=self.keys_BT.device)
        # Padding takes any token's key, as its weights do not count.
        keys_BQ = rng.bits(self.name_key, self.keys_BT[:, indices.clamp(min=0)])
        keys_BAQ = rng.bits(keys_BQ.unsqueeze(1), heads_A.unsqueeze(-1))
        return DropoutKeys(keys=keys_BAQ, probability=self.probability)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    layout: ContextLayout,
    axes: ContextAxes,
    mask_spec: MaskSpec,
    scale: float | None = None,
    dropout: DropoutSpec | None = None,
    bias: RelativePositionBias | None = None,
    source: CrossAttentionLayout | None = None,
    cache: dict[Any, Any] | None = None,
) -> Tensor:
    """Attention of this rank's queries [B, A, N, D] to the keys and values [B, G, N, D] of all ranks: [B, A, N, D].

    Padding may hold anything; its output and gradients are 0. The gradient of `bias.table` is a partial sum
    over all ranks. `scale` is 1 / sqrt(D) where None. Keys and values may be of another stream, `source`, [B, G, M, D].
    `cache` holds what calls of one layout share. The Ulysses size must divide A.
    """
    device = queries.device
    if (dtype := autocast_dtype(queries)) is not None:
        # Autocast does so for torch's own attention: norms of queries and keys may have left them wider.
        queries, keys, values = (x.to(dtype) for x in (queries, keys, values))
    num_heads, ulysses = queries.shape[1], axes.ulysses
    assert (layout.ring_size, layout.ulysses_size) == (axes.ring.size, ulysses.size), "the layout is one of other axes"
    assert num_heads % ulysses.size == 0, f"{num_heads} heads do not divide by {ulysses.name} ({ulysses.size})"
    # Every Ulysses rank needs the keys of its own heads; a key head that ranks share is repeated for each.
    repeats = math.lcm(keys.shape[1], ulysses.size) // keys.shape[1]
    queries, keys, values = (
        all_to_all(x, ulysses, split=1, join=2) for x in (queries, _repeated(keys, repeats), _repeated(values, repeats))
    )
    group, cache = axes.ring.rank, {} if cache is None else cache
    scale = 1.0 / math.sqrt(queries.shape[-1]) if scale is None else scale
    key = (layout, source, group, mask_spec, scale)
    steps = _once(cache, key, lambda: _steps(layout, source, group, mask_spec, scale))
    # Without tokens there are no dropout keys.
    if dropout is not None and layout.num_tokens:
        indices = _once(cache, (layout, group, device), lambda: layout.places_of_group(group, device))
        dropout_keys = dropout.dropout_keys(indices, ulysses, num_heads)
        steps = [replace(step, dropout_keys=dropout_keys) for step in steps]
    table = None
    if bias is not None:
        table = bias.table.chunk(ulysses.size, dim=1)[ulysses.rank]
        of_own_heads = replace(bias, table=table.detach())
        steps = [replace(step, bias=of_own_heads) for step in steps]
    output: Tensor = _Attention.apply(queries, keys, values, table, axes, steps)
    return all_to_all(output, ulysses, split=2, join=1)


def _repeated(keys: Tensor, repeats: int) -> Tensor:
    """Each key head repeated, copies next to each other."""
    return keys.unsqueeze(2).expand(-1, -1, repeats, -1, -1).flatten(1, 2)


def _once(cache: dict[Any, Any], key: Any, make: Callable[[], Made]) -> Made:
    """Cached value of the key, made on the first call."""
    if key not in cache:
        cache[key] = make()
    made: Made = cache[key]
    return made


def _steps(
    layout: ContextLayout,
    source: CrossAttentionLayout | None,
    group: int,
    mask_spec: MaskSpec,
    scale: float,
) -> list[AttentionStep]:
    """Attention steps of a group's queries, one for the keys of each group."""
    key_layout = layout if source is None else source.layout
    query_positions = layout.group_positions[group]
    return [
        AttentionStep(
            blocks=layout.blocks(group, other, mask_spec) if source is None else source.blocks(layout, group, other),
            query_positions=query_positions,
            key_positions=key_positions,
            mask_spec=mask_spec,
            scale=scale,
        )
        for other, key_positions in enumerate(key_layout.group_positions)
    ]


def _without_autocast(function: Any) -> Any:
    """Runs a function of a context and queries without autocast: kernels choose their dtypes."""

    @wraps(function)
    def call(ctx: Any, queries: Tensor, *rest: Any) -> Any:
        with autocast(queries, None):
            return function(ctx, queries, *rest)

    return call


class _Attention(torch.autograd.Function):
    """Attention [B, A, Q, D] of a group's queries to the keys of all groups, which arrive once in either direction.

    Only this rank's tokens are saved for backward. The backward of a step takes output and log-sum-exp over all keys.
    """

    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor | None,
        axes: ContextAxes,
        steps: list[AttentionStep],
    ) -> Tensor:
        output: Tensor | None = None
        lse: Tensor | None = None
        for source, (source_keys, source_values) in axes.exchange.visits((keys, values), axes.ring):
            step = steps[source]
            if not step.blocks:
                continue
            part = kernel_for(queries, step, axes.kernel).forward(queries, source_keys, source_values, step)
            if output is None or lse is None:
                output, lse = part
            else:
                merge_(output, lse, *part)
        if output is None or lse is None:
            output = torch.zeros_like(queries)
            lse = torch.full(queries.shape[:-1], -torch.inf, device=queries.device)
        output = output.to(queries.dtype)
        ctx.save_for_backward(queries, keys, values, output, lse, table)
        ctx.axes, ctx.steps = axes, steps
        return output

    @staticmethod
    @_without_autocast
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, output, lse, table = ctx.saved_tensors
        exchange, ring = ctx.axes.exchange, ctx.axes.ring
        returns = exchange.returns(keys, ring)
        d_queries: Tensor | None = None
        d_table: Tensor | None = None
        for source, (source_keys, source_values) in exchange.visits((keys, values), ring):
            step = ctx.steps[source]
            if not step.blocks:
                returns.add(source, None)
                continue
            kernel = kernel_for(queries, step, ctx.axes.kernel)
            inputs = BackwardInputs(grad, queries, source_keys, source_values, output, lse)
            part = kernel.backward(inputs, step)
            returns.add(source, (part.keys, part.values))
            d_queries, d_table = _sum_(d_queries, part.queries), _sum_(d_table, part.table)
        grads = zip((d_queries, *returns.finish(), d_table), (queries, keys, values, table), strict=True)
        return *(_typed(grad, x) for grad, x in grads), None, None


def _sum_(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Sum of two optional tensors, in the memory of `total`."""
    return part if total is None or part is None else total.add_(part)


def _typed(total: Tensor | None, x: Tensor | None) -> Tensor | None:
    """Gradient of an optional input in its dtype; zeros where nothing was added."""
    if x is None:
        return None
    return torch.zeros_like(x) if total is None else total.to(x.dtype)
