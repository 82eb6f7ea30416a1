"""The token stream that every layer works on: order, positions and random keys of its tokens.

A model makes one `Tokens` for a call, on every stage alike, from its inputs; hidden states then travel as [T, H] or,
in the sequence-parallel region, [T/sp, H]. The stream is batch-major; T is batch * num_rows rounded up to a multiple
of sp, and what is beyond the real tokens is computed by nobody who looks at other tokens, and never counts.

Of a caller's [B, S] the stream of a rank is either its part of every row, cut alike, or, where documents are packed,
its part of every document, all in one row. Tokens of no document are left out.

B batch, S sequence, N tokens of each sample of the stream on this rank, T tokens with padding, R pairs of rotated
features, X tokens of a sample of the full stream, G segments of a sample.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.comm import collectives, differentiable, rng
from lightning_megatron.comm.host_numbers import on_device
from lightning_megatron.comm.rng import Draws
from lightning_megatron.context.attention import AttentionCall, ContextAxes
from lightning_megatron.context.cache import CachedCall
from lightning_megatron.context.context_layout import PADDING, ContextLayout, cut
from lightning_megatron.context.documents import Documents
from lightning_megatron.context.key_value_exchange import AllGatherExchange, RingExchange
from lightning_megatron.handles import handle_of
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.moe.sequence_groups import RoutedTokens
from lightning_megatron.transformer.position_cache import PositionCache


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The stream of one call; `flat` makes it from [batch, sequence]."""

    shape: tuple[int, int]
    """Shape of the caller's input: batch and sequence."""
    batch: int
    """Samples of the stream, cut alike: the caller's rows, or one where documents are packed."""
    sp: Axis
    """Cuts the stream between tensor-parallel regions."""
    cp: Axis
    """Axis whose ranks share each sample."""
    context: ContextAxes
    """Axes and exchange of context-parallel attention."""
    layout: ContextLayout
    """Layout of each sample on the ranks of cp."""
    index_X: Tensor | None
    """Index in the caller's [B * S] of each token of the stream of all ranks, int64; none where that has all, in order.
    """
    is_packed: bool
    """Whether segments are documents, and the stream is one sample."""
    document_starts: tuple[int, ...]
    """Index in the caller's [B * S] of the first token of each document, where the stream is packed."""
    positions_1N: Tensor
    """Positions of this rank's tokens in their segments, int64 [1, N]; [B, N] where rows continue from their own
    positions."""
    make_keys: Callable[[], Tensor]
    """Makes `keys_BX`; many calls draw nothing."""
    rotary_cos_1NR: Tensor
    """Cosines of the angles that queries and keys are rotated by, float64 [1, N, pairs]; without pairs nothing rotates.
    """
    rotary_sin_1NR: Tensor
    tables: dict[torch.dtype, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Cosines and sines in other dtypes, as layers ask for them."""
    positions: dict[int, Tensor] = field(default_factory=dict)
    """Positions of the tokens of the stream, by the number of rows, as parts of a model ask for them."""
    past: CachedCall | None = None
    """Cache of keys and values that this call fills and reads; none: nothing is cached."""
    masks: dict[tuple[object, ...], Tensor] = field(init=False, default_factory=dict)
    """Attention masks that the layers of this call share, by what they are functions of."""
    shared: dict[object, object] = field(init=False, default_factory=dict)
    """Cache that the layers of this call share for context-parallel attention."""
    attention: Tensor = field(init=False)
    """Handle of the `AttentionCall` of all layers, for compiled code."""

    def __post_init__(self) -> None:
        call = AttentionCall(layout=self.layout, axes=self.context, cache=self.shared)
        object.__setattr__(self, "attention", handle_of(call))

    @property
    def num_rows(self) -> int:
        """N: this rank's tokens of each sample, with the padding of an uneven cut."""
        return self.layout.num_rows

    @property
    def is_whole(self) -> bool:
        """Whether each sample is one segment, all of it here."""
        return self.cp.size == 1 and not self.is_packed

    @property
    def num_real(self) -> int:
        return self.batch * self.num_rows

    @property
    def num_tokens(self) -> int:
        """T: the real tokens and the padding after them."""
        return -(-self.num_real // self.sp.size) * self.sp.size

    @property
    def num_padding(self) -> int:
        return self.num_tokens - self.num_real

    @property
    def device(self) -> torch.device:
        return self.positions_1N.device

    @cached_property
    def keys_BX(self) -> Tensor:
        """Random key of each token of the stream of all ranks, int64."""
        return self.make_keys()

    @property
    def positions_T(self) -> Tensor:
        """Position of each token of the stream in its segment: int64."""
        if self.batch not in self.positions:
            # What inference mode makes no later call could save for its backward.
            with torch.inference_mode(False):
                self.positions[self.batch] = self.flat_own(self.positions_1N)
        return self.positions[self.batch]

    @property
    def _is_all_own(self) -> bool:
        """Whether the stream of all ranks is this rank's, without padding."""
        return self.cp.size == 1 and self.layout.num_tokens == self.num_rows

    @cached_property
    def _places_N(self) -> Tensor:
        """Index of each own token in the stream of all ranks, PADDING for padding: int64."""
        return self.layout.places(self.context.rank, self.device)

    @cached_property
    def own_N(self) -> Tensor:
        """Index of each own token in the stream of all ranks, 0 for padding: int64."""
        return self._places_N.clamp(min=0)

    @cached_property
    def is_padding_N(self) -> Tensor:
        """Mask of padding among the own tokens."""
        return self._places_N == PADDING

    def _own(self, values_BX: Tensor) -> Tensor:
        """Values of the own tokens, anything for padding: [batch, N]."""
        return values_BX if self._is_all_own else _filled(values_BX).index_select(1, self.own_N)

    def select(self, values_BS: Tensor) -> Tensor:
        """The caller's values in the order of the stream of all ranks: [batch, X]."""
        if self.index_X is None:
            return values_BS.reshape(self.batch, -1)
        return values_BS.reshape(-1).index_select(0, self.index_X).unsqueeze(0)

    def flat(self, values_BS: Tensor, padding: int = 0) -> Tensor:
        """One of the caller's values per token of the stream, `padding` where there is no real token: [T]."""
        values = values_BS.expand(self.shape)
        if not self.is_whole:
            values = self._own(self.select(values))
        if not self._is_all_own:
            values = values.masked_fill(self.is_padding_N, padding)
        return self._with_padding(values.reshape(-1), padding)

    def flat_own(self, values_BN: Tensor) -> Tensor:
        """One of this rank's values per token of the stream: [T]."""
        return self._with_padding(values_BN.expand(self.batch, self.num_rows).reshape(-1), 0)

    def first_places(self) -> list[int]:
        """Index in the stream of the first token of each of the caller's rows, PADDING where another rank of cp holds
        it, or the row has no token there."""
        rows, sequence = self.layout.first_rows(self.context.rank), self.shape[1]
        if self.is_packed:
            places = dict(zip(self.document_starts, rows, strict=True))
            return [places.get(row * sequence, PADDING) for row in range(self.shape[0])]
        [first] = rows
        return [PADDING if first == PADDING else row * self.num_rows + first for row in range(self.batch)]

    def unflat(self, values_TV: Tensor) -> Tensor:
        """Values of each token of the caller's [batch, sequence], from the streams of all ranks; 0 where it is in none.

        Ranks of cp that do the same with it get a gradient each, and these are summed.
        """
        values = values_TV[: self.num_real].view(self.batch, self.num_rows, -1)
        if not self.is_whole:
            values = differentiable.all_gather(values, self.cp, dim=1)
            if not self._is_all_own:
                values = values.index_select(1, self.layout.rows.to(self.device, non_blocking=True))
            if self.index_X is not None:
                everywhere = values.new_zeros(self.shape[0] * self.shape[1], values.shape[-1])
                values = everywhere.index_copy(0, self.index_X, values[0])
        return values.view(*self.shape, -1)

    def shard(self, values_T: Tensor) -> Tensor:
        """This rank's part of a stream of values: [T/sp]."""
        length = self.num_tokens // self.sp.size
        return values_T.narrow(0, self.sp.rank * length, length)

    def pad(self, real_TH: Tensor) -> Tensor:
        """The real tokens' rows, followed by zero rows for the padding: [T, ...]."""
        return F.pad(real_TH, (0, 0, 0, self.num_padding)) if self.num_padding else real_TH

    def rotary_tables(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines in a dtype, which layers share: [1, N, R] each."""
        if torch.compiler.is_compiling():
            # The layer that makes them would be another one than those that find them: here each makes its own.
            return self.rotary_cos_1NR.to(dtype), self.rotary_sin_1NR.to(dtype)
        if dtype not in self.tables:
            # As in `PositionCache.rows`: later calls may share them.
            with torch.inference_mode(False):
                self.tables[dtype] = self.rotary_cos_1NR.to(dtype), self.rotary_sin_1NR.to(dtype)
        return self.tables[dtype]

    @cached_property
    def keys_BN(self) -> Tensor:
        """A random key for each of this rank's tokens, int64 [B, N]."""
        return self._own(self.keys_BX)

    @cached_property
    def stream_keys(self) -> Tensor:
        """A random key for each token of the stream: int64 [T]."""
        return self.flat_own(self.keys_BN)

    @cached_property
    def shard_keys(self) -> Tensor:
        """A random key for each token of this rank's part: int64 [T/sp]."""
        return self.shard(self.stream_keys)

    def draw(self) -> None:
        """Makes the random keys, for compiled layers: they may read what is made at first use, and not make it."""
        # These are made of all others.
        _ = self.shard_keys

    def routed(self, weights_BS: Tensor | None, cut: Axis, call: int) -> RoutedTokens:
        """Metadata of this rank's part of the stream over `cut` for routers; calls of a step have different numbers.

        `weights_BS` say how much each of the caller's tokens counts in the loss of the model, where there are auxiliary
        losses; in these the tokens of a segment share its sum alike.
        """
        num = len(self.layout.lengths)
        lengths_G = on_device(self.layout.lengths, self.device)
        segments_X = torch.repeat_interleave(lengths_G, output_size=self.layout.num_tokens)
        firsts_B1 = torch.arange(0, self.batch * max(num, 1), max(num, 1), device=self.device).unsqueeze(1)
        segments_T = self.flat_own(firsts_B1 + self._own(segments_X.unsqueeze(0)))
        num_missing = -self.num_tokens % cut.size

        def part(values_T: Tensor) -> Tensor:
            return collectives.shard_slice(F.pad(values_T, (0, num_missing)) if num_missing else values_T, cut)

        weights_T = None
        if weights_BS is not None:
            means_BG = torch.zeros(self.batch, num, dtype=torch.float64, device=self.device)
            means_BG.index_add_(1, segments_X, self.select(weights_BS).double()).div_(lengths_G.clamp(min=1))
            weights_T = part(means_BG.flatten().index_select(0, segments_T) if num else segments_T.double())

        length = -(-self.num_tokens // cut.size)
        routed = RoutedTokens(
            is_real_T=part(self.flat_own((self._places_N != PADDING).unsqueeze(0))),
            num_real=self._num_real_before((cut.rank + 1) * length) - self._num_real_before(cut.rank * length),
            segments_T=part(segments_T),
            lengths=self.layout.lengths * self.batch,
            positions_T=part(self.positions_T),
            make_keys=lambda: part(self.stream_keys),
            weights_T=weights_T,
            axes=(cut, self.cp),
            call=call,
            is_packed=self.is_packed,
        )
        # It holds others than those that it is a part of: they would hold each other for ever.
        return replace(routed, handle=handle_of((routed, self)))

    def _num_real_before(self, place: int) -> int:
        """Number of tokens that are no padding before a place of the stream."""
        own = self.layout.num_own(self.context.rank)
        samples, rest = divmod(min(place, self.num_real), self.num_rows)
        return samples * own + min(rest, own)

    def _with_padding(self, values_T: Tensor, padding: int) -> Tensor:
        return F.pad(values_T, (0, self.num_padding), value=padding) if self.num_padding else values_T


def _filled(values_BX: Tensor) -> Tensor:
    """Values with one more column where there is no token at all, for padding to take."""
    return values_BX if values_BX.shape[1] else F.pad(values_BX, (0, 1))


def stream_of(
    shape: tuple[int, int],
    *,
    positions: PositionCache,
    mesh: Mesh,
    draws: Draws,
    device: torch.device,
    documents: Documents | None = None,
    group: Axis | None = None,
    is_causal: bool = True,
) -> Tokens:
    """The stream of a call with inputs [batch, sequence], each row a segment unless `documents` are given.

    It is cut over `group`, if there is one, else over cp: causal work by zig-zag, other work into contiguous parts.
    Raises ValueError where documents came from other ranks (`draws.documents`) and the call does not tell them apart.
    """
    if draws.documents is not None:
        _require_named(documents, draws.documents)
    axes = _axes_of(mesh, group)
    key = (shape[1],) if documents is None else documents.lengths, axes.ring.size, axes.ulysses.size, is_causal
    make_layout = partial(cut, *key)
    own = (
        positions.rows(key, make_layout, axes.rank, device)
        if documents is None
        else positions.of(make_layout(), axes.rank, device)
    )
    return Tokens(
        shape=shape,
        batch=shape[0] if documents is None else 1,
        sp=mesh.sp,
        cp=mesh.cp if group is None else group,
        context=axes,
        layout=own.layout,
        # Documents are in order: as many tokens as the batch has are all of it.
        index_X=None if documents is None or documents.num_tokens == prod(shape) else documents.index_X,
        is_packed=documents is not None,
        document_starts=() if documents is None else documents.starts,
        positions_1N=own.positions_1N,
        # The draws of this call: their owner sets others for the next, before the backward of this one.
        make_keys=partial(_token_keys, shape, documents, replace(draws), device),
        rotary_cos_1NR=own.cos_1NR,
        rotary_sin_1NR=own.sin_1NR,
        tables=own.tables,
        positions=own.flat,
    )


def _token_keys(shape: tuple[int, int], documents: Documents | None, draws: Draws, device: torch.device) -> Tensor:
    """A random key for each token of the stream of all ranks: int64 [B, X]."""
    if documents is None:
        positions = torch.arange(shape[1], device=device)
        return rng.bits(draws.sample_keys(shape[0], device).unsqueeze(1), positions)
    if draws.documents is None:
        return documents.token_keys(draws.sample_keys(shape[0], device)).unsqueeze(0)
    return documents.token_keys_of(draws.document_keys(device)).unsqueeze(0)


def unsplit_stream(
    mesh: Mesh,
    shape: tuple[int, int],
    positions_1N: Tensor,
    make_keys: Callable[[], Tensor],
    cos_1NR: Tensor,
    sin_1NR: Tensor,
) -> Tokens:
    """Stream of a call whose tokens every cp rank has in full; `shape` is its batch and sequence."""
    batch, sequence = shape
    alone = Axis.alone(mesh.global_rank)
    return Tokens(
        shape=(batch, sequence),
        batch=batch,
        sp=mesh.sp,
        cp=alone,
        context=ContextAxes(ring=alone, ulysses=alone),
        layout=cut((sequence,)),
        index_X=None,
        is_packed=False,
        document_starts=(),
        positions_1N=positions_1N,
        make_keys=make_keys,
        rotary_cos_1NR=cos_1NR,
        rotary_sin_1NR=sin_1NR,
    )


def _axes_of(mesh: Mesh, group: Axis | None) -> ContextAxes:
    """Axes and exchange of a call's context-parallel attention."""
    exchange = AllGatherExchange() if mesh.sizes.cp_exchange == "all_gather" else RingExchange()
    if group is None:
        ring, ulysses = mesh.axis("cp_ring"), mesh.axis("cp_ulysses")
    else:
        alone = Axis.alone(mesh.global_rank)
        ring, ulysses = (alone, group) if mesh.sizes.context_groups_by_heads else (group, alone)
    return ContextAxes(ring=ring, ulysses=ulysses, exchange=exchange, kernel=mesh.sizes.attention_kernel)


def _require_named(documents: Documents | None, names: Tensor) -> None:
    num = 0 if documents is None else len(documents.lengths)
    if documents is None or num != len(names):
        raise ValueError(
            f"dynamic context parallelism packed {len(names)} documents into this microbatch, and the model was told "
            f'of {num}; hand it all rows of the batch and their bounds: model(..., segments=batch["segments"])'
        )
