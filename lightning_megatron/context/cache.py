"""The key-value cache: keys and values of past tokens, to which later tokens attend.

A cache belongs to the rows of a batch, and holds on each rank of `cp` a part of the tokens: of the first call those
that the rank computes, of later ones, whose tokens every rank computes, each token on one rank, in turn. Each rank
attends to its part of the cache; the partial results are merged by their log-sum-exp.

    call 1 (5 tokens, cut over 2 ranks)     rank 0: 0 3 4     rank 1: 1 2
    calls 2, 3, 4 (a token each)            rank 0: 0 3 4 6   rank 1: 1 2 5 7

Where every rank computes the tokens of the first call too, they are cached in turn from the start.

Rows have different lengths: a column holds for each row a token of one call, or none, which its position says, -1 for
none.

B rows of a call, A query heads here, G key heads here, N tokens of a row that this rank computes, C columns of this
rank, D head size.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.context.attention_step import RelativePositionBias, capped_, wide
from lightning_megatron.context.context_layout import PADDING, MaskSpec
from lightning_megatron.mesh import Axis
from lightning_megatron.precision.autocast import autocast, autocast_dtype

# Least number of columns by which a cache grows; a large one grows by a quarter.
_LEAST_GROWTH = 64


class KeyValueCache:
    """Keys and values of `num_rows` rows that the attention layers of this rank cache, by name of the layer.

    Every rank of `cp` makes the same calls. `open` may be called several times in a call, for some of the rows each or
    for the same ones; `close` ends the call. The first call's tokens are cut over cp unless `is_cut` is false.
    """

    def __init__(self, num_rows: int, *, cp: Axis, is_cut: bool = True) -> None:
        self.num_rows, self.cp, self.is_cut = num_rows, cp, is_cut
        # Number of columns of finished calls.
        self.num_columns = 0
        # Number of tokens of all calls after the first: it decides which rank caches the next.
        self.num_seen = 0
        # Keys and values of each layer, [rows, G, columns or more, D].
        self.keys_values: dict[str, tuple[Tensor, Tensor]] = {}
        self._positions_RC: Tensor | None = None
        # Columns and tokens of the call that is open.
        self._opened = (0, 0)

    @property
    def is_empty(self) -> bool:
        """Whether no call is finished, and the next one gives each rank its own tokens."""
        return self.is_cut and self.num_columns == 0

    def open(self, rows: slice, positions_BN: Tensor) -> "CachedCall":
        """Opens a call of these rows, whose tokens have these positions, -1 for none.

        The tokens of a first call that is cut are this rank's, and it caches all of them; every rank has the tokens of
        other calls.
        """
        num = positions_BN.shape[1]
        own_N = None
        if not self.is_empty:
            own_N = (torch.arange(num) + self.num_seen) % self.cp.size == self.cp.rank
            own_N = own_N.nonzero().flatten().to(positions_BN.device)
        cached_BN = positions_BN if own_N is None else positions_BN.index_select(1, own_N)
        first, last = self.num_columns, self.num_columns + cached_BN.shape[1]
        if self._positions_RC is None:
            self._positions_RC = positions_BN.new_empty(self.num_rows, 0)
        self._positions_RC = _with_room(self._positions_RC, last, dim=1, fill=PADDING)
        self._positions_RC[rows, first:last] = cached_BN
        self._opened = cached_BN.shape[1], 0 if own_N is None else num
        return self._call(rows, positions_BN, self._positions_RC, slice(first, last), own_N)

    def read(self, rows: slice, positions_BN: Tensor) -> "CachedCall":
        """A call whose tokens, which every rank has, attend to the cache and are not cached: cross-attention."""
        assert self._positions_RC is not None, "there is nothing to read before the first call"
        columns = slice(self.num_columns, self.num_columns)
        return self._call(rows, positions_BN, self._positions_RC, columns, positions_BN.new_empty(0))

    def _call(
        self, rows: slice, positions_BN: Tensor, positions_RC: Tensor, columns: slice, own_N: Tensor | None
    ) -> "CachedCall":
        return CachedCall(
            cache=self,
            rows=rows,
            columns=columns,
            own_N=own_N,
            query_positions_BN=positions_BN,
            key_positions_BC=positions_RC[rows, : columns.stop],
            seen={},
        )

    def close(self) -> None:
        """Ends a call, whose cached tokens the next one sees."""
        num_columns, num_tokens = self._opened
        self.num_columns, self.num_seen = self.num_columns + num_columns, self.num_seen + num_tokens
        self._opened = (0, 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedCall:
    """One call of a cache, for all layers; `KeyValueCache.open` makes it."""

    cache: KeyValueCache
    rows: slice
    """Rows of the cache."""
    columns: slice
    """Columns that the call fills."""
    own_N: Tensor | None
    """Tokens of the call that this rank caches: int64; None means all."""
    query_positions_BN: Tensor
    """Positions of the queries: int64, -1 for no token."""
    key_positions_BC: Tensor
    """Positions of the cached keys: int64, -1 for no token."""
    seen: dict[MaskSpec, Tensor]
    """Masks of the call, bool [B, N, C], which its layers share."""

    @property
    def is_first(self) -> bool:
        """Whether queries see tokens of this call alone, so that attention needs nothing of the cache."""
        return self.cache.is_empty

    def update(self, layer: str, keys: Tensor, values: Tensor) -> None:
        """Caches this rank's part of the call's keys and values [B, G, N, D]."""
        if (dtype := autocast_dtype(keys)) is not None:
            # Attention reads them in this dtype; norms may have left them wider.
            keys, values = (x.to(dtype) for x in (keys, values))
        new = [x if self.own_N is None else x.index_select(2, self.own_N) for x in (keys, values)]
        old = self.cache.keys_values.get(layer)
        if old is None:
            old = tuple(x.new_empty(self.cache.num_rows, x.shape[1], 0, x.shape[3]) for x in new)  # type: ignore[assignment]
        assert old is not None
        cached_keys, cached_values = (_with_room(x, self.columns.stop, dim=2, fill=0) for x in old)
        cached_keys[self.rows, :, self.columns], cached_values[self.rows, :, self.columns] = new
        self.cache.keys_values[layer] = cached_keys, cached_values

    def attend(
        self,
        layer: str,
        queries: Tensor,
        *,
        mask_spec: MaskSpec,
        scale: float | None = None,
        bias: RelativePositionBias | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        value_dim: int = 0,
    ) -> Tensor:
        """Attention of queries [B, A, N, D], which every rank of cp has, to the cache: [B, A, N, D].

        A query without a position sees nothing under a causal mask, and its output is 0. `scale` None is 1 / sqrt(D).
        `softcap` and `sinks` [A] are as in `context.attention.attend`. With a `value_dim` that many first features of
        keys are the values.
        """
        keys, values = (x[self.rows, :, : self.columns.stop] for x in self.cache.keys_values[layer])
        if value_dim:
            values = keys[..., :value_dim]
        with autocast(queries, None):
            output, lse = self._part(queries.to(keys.dtype), keys, values, mask_spec, scale, bias, softcap)
            return _merged(output, lse, self.cache.cp, sinks).to(queries.dtype)

    def _part(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask_spec: MaskSpec,
        scale: float | None,
        bias: RelativePositionBias | None,
        softcap: float,
    ) -> tuple[Tensor, Tensor]:
        """Attention to this rank's keys: output [B, A, N, D] and log-sum-exp [B, A, N], in float32 or wider."""
        batch, heads, num, size = queries.shape
        groups, rows = keys.shape[1], heads // keys.shape[1] * num
        # The query heads of a key head are rows of one GEMM, so keys are never repeated.
        grouped = queries.reshape(batch, groups, rows, size)
        scores = (grouped @ keys.transpose(-1, -2)).view(batch, heads, num, keys.shape[2])
        scores = scores.to(wide(scores.dtype)) * (1.0 / math.sqrt(size) if scale is None else scale)
        scores = capped_(scores, softcap)
        if bias is not None:
            scores = scores + self._biases(bias).to(scores.dtype)
        scores = scores.masked_fill(~self._visible(mask_spec).unsqueeze(1), -torch.inf)
        lse = scores.logsumexp(dim=-1)
        # For a query that sees no key here, -inf minus -inf is nan.
        weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
        attended = weights.to(values.dtype).view(batch, groups, rows, keys.shape[2]) @ values
        return attended.view(batch, heads, num, values.shape[-1]).to(scores.dtype), lse

    def _visible(self, mask_spec: MaskSpec) -> Tensor:
        if mask_spec not in self.seen:
            keys = self.key_positions_BC.unsqueeze(1)
            distance = self.query_positions_BN.unsqueeze(2) - keys
            self.seen[mask_spec] = (keys != PADDING) & mask_spec.sees(distance)
        return self.seen[mask_spec]

    def _biases(self, bias: RelativePositionBias) -> Tensor:
        """Biases of the scores, [B, A, N, C]."""
        distance = self.key_positions_BC.unsqueeze(1) - self.query_positions_BN.unsqueeze(2)
        return bias.table[bias.bucket(distance)].permute(0, 3, 1, 2)


def _merged(output: Tensor, lse: Tensor, axis: Axis, sinks_A: Tensor | None) -> Tensor:
    """Partial results of all ranks, and sinks, merged by their log-sum-exp: one all-gather, equal bits on each rank."""
    parts = torch.cat([output, lse.unsqueeze(-1)], dim=-1).unsqueeze(0)
    outputs, lses = collectives.all_gather(parts, axis).split([output.shape[-1], 1], dim=-1)
    # If no rank saw a key, -inf minus -inf is nan.
    lse_of_all = lses.logsumexp(dim=0, keepdim=True)
    if sinks_A is not None:
        lse_of_all = torch.logaddexp(lse_of_all, sinks_A.to(lse_of_all.dtype)[:, None, None])
    weights = (lses - lse_of_all).exp().nan_to_num(0.0)
    merged: Tensor = (outputs * weights).sum(dim=0)
    return merged


def _with_room(x: Tensor, num_columns: int, *, dim: int, fill: int) -> Tensor:
    """`x` with at least `num_columns` columns along `dim`; new ones hold `fill`."""
    missing = num_columns - x.shape[dim]
    if missing <= 0:
        return x
    shape = list(x.shape)
    # The first call sets the initial size; later calls add little each.
    shape[dim] = missing if x.shape[dim] == 0 else max(missing, _LEAST_GROWTH, x.shape[dim] // 4)
    return torch.cat([x, x.new_full(shape, fill)], dim=dim)
