"""Attention of a decoder to what an encoder made: queries of one stream, keys and values of another.

The rows of the fused key-value weight are G groups, each of one key head and one value head: [G * 2 * D, H]. Where tp
divides G a rank holds full groups; where G divides tp the output is gathered over tp and a rank takes its group, as in
self-attention.

B batch, N tokens of each sample on this rank, T tokens, H hidden, A query heads here, G groups, D head size.
"""

from dataclasses import dataclass, field

from torch import Tensor, nn

from lightning_megatron.comm import differentiable
from lightning_megatron.context.attention import AttentionHandles, attend
from lightning_megatron.context.cache import CachedCall
from lightning_megatron.context.cross_attention_layout import CrossAttentionLayout
from lightning_megatron.handles import handle_of
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Initial
from lightning_megatron.tensor.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.transformer.attention import BIDIRECTIONAL, fused_heads, local_heads
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.dropout import AttentionDropout
from lightning_megatron.transformer.tokens import Tokens


@dataclass(frozen=True, eq=False)
class EncoderMemory:
    """Output of an encoder that a decoder attends to."""

    hidden_MH: Tensor
    """The encoder's output [M/sp, H]."""
    tokens: Tokens
    """The encoder's stream."""
    source: CrossAttentionLayout | None
    """Segments of the encoder's stream that each segment of the decoder's attends to; none where keys and values are
    cached."""
    source_handle: Tensor | None = field(init=False)
    """Handle of `source`, for compiled code."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "source_handle", None if self.source is None else handle_of(self.source))


@dataclass(frozen=True, eq=False)
class CachedEncoderMemory:
    """Cached keys and values of an encoder output: the call with its `EncoderMemory` fills them, later calls read them.

    Every rank of cp has all of the decoder's tokens, and a part of the encoder's.
    """

    past: CachedCall
    """Cache of one call, whose queries are the decoder's tokens."""
    own_BC: Tensor
    """Index of each sample's tokens in this rank's part of the encoder's stream, all in one row, int64; -1 for none.
    """

    def update(self, layer: str, keys: Tensor, values: Tensor) -> None:
        """Caches keys and values of this rank's stream [1, G, M, D]."""
        own = self.own_BC.clamp(min=0)
        self.past.update(
            layer,
            *(x[0].index_select(1, own.flatten()).unflatten(1, own.shape).transpose(0, 1) for x in (keys, values)),
        )


class CrossAttention(nn.Module):
    """Attention of a stream to the encoder's: [T/sp, H] and the encoder's [M/sp, H] to [T/sp, H].

    `name` is its name in the model. A token whose document has nothing in the other stream gets 0 before the
    projection. Where keys and values are `cached`, `memory` is needed only in the call that makes them.
    """

    def __init__(self, config: TransformerConfig, *, tp: Axis, sp: Axis, name: str) -> None:
        super().__init__()
        self.name = name
        self.heads = local_heads(config, tp)
        self.is_gathered = config.num_query_groups % tp.size != 0
        self.tp = tp
        self.scale = config.score_scale
        features, initial = config.num_attention_heads * config.head_dim, Initial(std=config.init_std)
        self.query = ColumnParallelLinear(
            config.hidden_size,
            features,
            tp=tp,
            sp=sp,
            bias=config.has_qkv_bias,
            initial=initial,
            fused=fused_heads(config, (config.heads_per_group,)),
        )
        self.key_value = ColumnParallelLinear(
            config.hidden_size,
            2 * config.num_query_groups * config.head_dim,
            tp=tp,
            sp=sp,
            bias=config.has_qkv_bias,
            initial=initial,
            fused=fused_heads(config, (1, 1)),
        )
        self.dropout = AttentionDropout(config.attention_dropout, name, first_head=tp.rank * self.heads.num_heads)
        self.projection = RowParallelLinear(
            features,
            config.hidden_size,
            tp=tp,
            sp=sp,
            bias=config.add_bias_linear,
            initial=Initial(std=config.output_std),
        )

    def forward(
        self, hidden_TH: Tensor, tokens: Tokens, memory: EncoderMemory | None, cached: CachedEncoderMemory | None = None
    ) -> Tensor:
        queries = self._by_head(self.query(hidden_TH, tokens), tokens).transpose(1, 2)
        if cached is not None:
            if memory is not None:
                cached.update(self.name, *self._keys_and_values(memory))
            attended = cached.past.attend(self.name, queries, mask_spec=BIDIRECTIONAL, scale=self.scale)
        else:
            assert memory is not None
            attended = self._attend(queries, tokens, memory)
        output: Tensor = self.projection(tokens.pad(attended.transpose(1, 2).reshape(tokens.num_real, -1)), tokens)
        return output

    def _keys_and_values(self, memory: EncoderMemory) -> tuple[Tensor, Tensor]:
        """Keys and values of the own heads: [B, G, M, D] each."""
        pairs = self.key_value(memory.hidden_MH, memory.tokens)
        if self.is_gathered:
            pairs = differentiable.all_gather(pairs, self.tp, dim=-1)
        own = self._by_head(pairs, memory.tokens).unflatten(2, (self.heads.groups, 2))
        own = own.narrow(2, self.heads.first_group, self.heads.num_groups)
        return own[:, :, :, 0].transpose(1, 2), own[:, :, :, 1].transpose(1, 2)

    def _attend(self, queries: Tensor, tokens: Tokens, memory: EncoderMemory) -> Tensor:
        assert memory.source is not None
        keys, values = self._keys_and_values(memory)
        # Core attention saves no scores: there is nothing to recompute.
        return attend(
            queries,
            keys,
            values,
            layout=tokens.layout,
            axes=tokens.context,
            mask_spec=BIDIRECTIONAL,
            scale=self.scale,
            dropout=self.dropout.spec(tokens),
            source=memory.source,
            cache=tokens.shared,
            handles=AttentionHandles(call=tokens.attention, source=memory.source_handle),
        )

    def _by_head(self, x_TC: Tensor, tokens: Tokens) -> Tensor:
        """The real tokens' features by head: [B, N, heads, D]."""
        return x_TC[: tokens.num_real].view(tokens.batch, tokens.num_rows, -1, self.heads.head_dim)
