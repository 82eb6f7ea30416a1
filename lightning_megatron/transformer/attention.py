"""Self-attention of one layer: a fused column-parallel query-key-value linear, attention of the own heads, a
row-parallel projection.

The rows of the fused weight are G groups, each of R query heads, one key head and one value head: [G * (R + 2) * D, H].
Where tp divides G a rank holds full groups. Where G divides tp a rank's rows are part of a group: the output is
gathered over tp, and the rank takes its share of one group's queries with that group's key and value; the gradients of
key and value are summed by the backward of the gather.

B batch, S sequence, T tokens, H hidden, A heads here, G groups, R query heads of a group, D head size, C fused
features.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.comm import differentiable
from lightning_megatron.context.attention import AttentionHandles, attend
from lightning_megatron.context.attention_step import RelativePositionBias
from lightning_megatron.context.context_layout import MaskSpec
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Fused, Initial, shard_parameter
from lightning_megatron.tensor.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.tensor.norm import ParallelRMSNorm, RMSNorm, ZeroCenteredRMSNorm
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.core_attention import CoreAttention, TorchCoreAttention
from lightning_megatron.transformer.dropout import AttentionDropout
from lightning_megatron.transformer.recompute import RecomputeLayer, checkpoint
from lightning_megatron.transformer.rotary import rotate, rotate_into, rotated
from lightning_megatron.transformer.sliding_window import is_visible
from lightning_megatron.transformer.tokens import Tokens

CAUSAL = MaskSpec(is_causal=True)
BIDIRECTIONAL = MaskSpec(is_causal=False)


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Heads of a fused query-key-value output that are this rank's."""

    groups: int
    """Key-value groups in the fused output."""
    queries: int
    """Query heads of a group."""
    head_dim: int
    """Features of a head."""
    first_group: int
    num_groups: int
    """This rank's groups."""
    first_query: int
    num_queries: int
    """This rank's query heads in each of its groups."""

    @property
    def num_heads(self) -> int:
        return self.num_groups * self.num_queries

    @property
    def is_all(self) -> bool:
        """Every feature of the fused output is this rank's."""
        return self.num_groups == self.groups and self.num_queries == self.queries


def local_heads(config: TransformerConfig, tp: Axis) -> Heads:
    """This rank's heads in the fused output: its own features, or those of all where tp has more ranks than groups."""
    groups, queries = config.num_query_groups, config.heads_per_group
    if groups % tp.size == 0:
        own, first_group, num_groups, first_query, num_queries = groups // tp.size, 0, groups // tp.size, 0, queries
    else:
        ranks_per_group = tp.size // groups
        own, first_group, num_groups = groups, tp.rank // ranks_per_group, 1
        num_queries = queries // ranks_per_group
        first_query = tp.rank % ranks_per_group * num_queries
    return Heads(
        groups=own,
        queries=queries,
        head_dim=config.head_dim,
        first_group=first_group,
        num_groups=num_groups,
        first_query=first_query,
        num_queries=num_queries,
    )


def fused_heads(config: TransformerConfig, sizes: tuple[int, ...]) -> Fused:
    """The projections that lie side by side in each group of heads, of so many heads each."""
    return Fused(shape=(config.num_query_groups, sum(sizes), config.head_dim), dim=1, sizes=sizes)


class _SplitHeads(torch.autograd.Function):
    """Queries, keys and values, rotated by their positions, out of the fused output; the backward fuses gradients.

    They are either all views of the fused output or all copies: a mixture would keep it alive besides the copies.
    `is_copied` where what follows would copy some.
    """

    @staticmethod
    def forward(
        ctx: Any,
        fused_TC: Tensor,
        cos_BSR: Tensor,
        sin_BSR: Tensor,
        batch: int,
        sequence: int,
        heads: Heads,
        is_copied: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.shape, ctx.heads = fused_TC.shape, heads
        cos, sin = cos_BSR[:, :, None, None], sin_BSR[:, :, None, None]
        ctx.save_for_backward(cos, sin)
        shape = (batch, sequence, heads.groups, heads.queries + 2, heads.head_dim)
        queries, keys, values = _parts(fused_TC[: batch * sequence].view(shape), heads)
        is_mergeable = heads.num_groups == 1 or heads.num_queries == 1
        if is_copied or cos.shape[-1] or not heads.is_all or not is_mergeable:
            turned = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in (queries, keys)]
            rotate_into(turned[0], queries, cos, sin)
            rotate_into(turned[1], keys, cos, sin)
            queries, keys, values = *turned, values.clone(memory_format=torch.contiguous_format)
        queries, keys, values = (part.flatten(2, 3).transpose(1, 2) for part in (queries, keys, values))
        return queries, keys, values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        heads: Heads = ctx.heads
        batch, _, sequence, _ = grads[0].shape
        is_filled = heads.is_all and batch * sequence == ctx.shape[0]
        queries, keys, values = (
            grad.transpose(1, 2).unflatten(2, (heads.num_groups, size))
            for grad, size in zip(grads, (heads.num_queries, 1, 1), strict=True)
        )
        if is_filled and torch.compiler.is_compiling():
            # A compiler makes one kernel of a tensor that is written at once, and reads one that it writes in parts.
            fused = torch.cat((rotated(queries, cos, -sin), rotated(keys, cos, -sin), values), dim=3)
            return fused.view(ctx.shape), None, None, None, None, None, None
        make = torch.empty if is_filled else torch.zeros
        fused_TC = make(ctx.shape, dtype=grads[0].dtype, device=grads[0].device)
        shape = (batch, sequence, heads.groups, heads.queries + 2, heads.head_dim)
        parts = _parts(fused_TC[: batch * sequence].view(shape), heads)
        rotate_into(parts[0], queries, cos, -sin)
        rotate_into(parts[1], keys, cos, -sin)
        parts[2].copy_(values)
        return fused_TC, None, None, None, None, None, None


def _parts(fused: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a fused [B, S, G, R + 2, D]: the own queries, keys and values, [B, S, groups, heads of each, D]."""
    own = fused.narrow(2, heads.first_group, heads.num_groups)
    return (
        own.narrow(3, heads.first_query, heads.num_queries),
        own.narrow(3, heads.queries, 1),
        own.narrow(3, heads.queries + 1, 1),
    )


def build_head_norm(config: TransformerConfig, num_heads: int, tp: Axis) -> RMSNorm | ParallelRMSNorm:
    """The norm of queries, or of keys, of so many heads: of each head alone, or of all at once."""
    if config.qk_norm_across_heads:
        return ParallelRMSNorm(num_heads * config.head_dim, eps=config.norm_epsilon, tp=tp)
    # Of the own heads alone, so that gradients are parts of a sum over tp, with sequence parallelism or not.
    kind = ZeroCenteredRMSNorm if config.normalization == "zero_centered_rmsnorm" else RMSNorm
    return kind(config.head_dim, eps=config.norm_epsilon, tp=tp, sp=tp)


def _normed(norm: RMSNorm | ParallelRMSNorm, heads_BSAD: Tensor) -> Tensor:
    if isinstance(norm, RMSNorm):
        normed: Tensor = norm(heads_BSAD)
    else:
        normed = norm(heads_BSAD.flatten(2)).view(heads_BSAD.shape)
    return normed


class Attention(RecomputeLayer):
    """The half that kinds of attention share: own queries, keys and values attend to each other. `name` is its name in
    the model."""

    recomputable = frozenset({"core_attention"})

    def __init__(self, config: TransformerConfig, *, tp: Axis, name: str, mask_spec: MaskSpec) -> None:
        super().__init__()
        assert mask_spec.is_causal or mask_spec.window == 0, "a window is one of causal attention"
        self.name, self.tp = name, tp
        self.scale, self.softcap = config.score_scale, config.attention_softcap
        first_pair = config.rotary_width if config.window_rotary_base and mask_spec.window else 0
        self.pairs = slice(first_pair, first_pair + config.rotary_width)
        self.sinks: nn.Parameter | None = None
        if config.attention_sinks:
            initial = Initial(std=config.init_std)
            self.sinks = shard_parameter((config.num_attention_heads,), initial=initial, dim=0, axis=tp)
        self.mask_spec = mask_spec
        # Used without documents, context parallelism, bias, soft cap, sinks or dropout.
        self.core_attention: CoreAttention = TorchCoreAttention(mask_spec=mask_spec, scale=self.scale)
        first_head = tp.rank * (config.num_attention_heads // tp.size)
        self.dropout = AttentionDropout(config.attention_dropout, name, first_head=first_head)

    def forward(self, hidden_TH: Tensor, tokens: Tokens, bias: RelativePositionBias | None = None) -> Tensor:
        """Output [T/sp, H] of hidden states [T/sp, H]."""
        raise NotImplementedError

    def _attended(
        self, queries: Tensor, keys: Tensor, values: Tensor, tokens: Tokens, bias: RelativePositionBias | None = None
    ) -> Tensor:
        """Attention of queries [B, A, N, D] to the keys and values [B, G, N, D] of this call: [B, A, N, D]."""
        is_plain = bias is None and not self.softcap and self.sinks is None
        if not (tokens.is_whole and is_plain) or (self.dropout.is_active and tokens.context.kernel == "flex"):
            attended = self._attend_in_context(queries, keys, values, tokens, bias)
        elif self.dropout.is_active and "core_attention" in self.recomputed:
            attended = checkpoint(self._attend_dropping, queries, keys, values, tokens)
        elif self.dropout.is_active:
            attended = self._attend_dropping(queries, keys, values, tokens)
        else:
            attended = self.core_attention(queries, keys, values, tokens.masks)
        return attended

    def _attend_in_context(
        self, queries: Tensor, keys: Tensor, values: Tensor, tokens: Tokens, bias: RelativePositionBias | None
    ) -> Tensor:
        """Attention within documents, whose tokens other ranks may hold too. Nothing of the size S^2 is saved."""
        return attend(
            queries,
            keys,
            values,
            layout=tokens.layout,
            axes=tokens.context,
            mask_spec=self.mask_spec,
            scale=self.scale,
            bias=bias,
            softcap=self.softcap,
            sinks=self.sinks,
            dropout=self.dropout.spec(tokens),
            cache=tokens.shared,
            handles=AttentionHandles(call=tokens.attention, bucket=None if bias is None else bias.bucket_handle),
        )

    def _attend_dropping(self, queries: Tensor, keys: Tensor, values: Tensor, tokens: Tokens) -> Tensor:
        """Attention with its weights materialised, so that the mask is ours; softmax in float32 or better."""
        group_shape = (-1, -1, queries.shape[1] // keys.shape[1], -1, -1)
        keys, values = (x.unsqueeze(2).expand(group_shape).flatten(1, 2) for x in (keys, values))
        weights: Tensor = self.dropout(self._weights(queries, keys, tokens), tokens)
        return weights.to(values.dtype) @ values

    def _weights(self, queries: Tensor, keys: Tensor, tokens: Tokens) -> Tensor:
        """Attention weights of each query over all keys, before dropout."""
        scores = queries @ keys.transpose(-1, -2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(self.scale)
        if self.mask_spec.is_causal:
            seen = is_visible(tokens.num_rows, self.mask_spec.window, scores.device)
            hidden = torch.zeros(seen.shape, dtype=scores.dtype, device=scores.device).masked_fill_(~seen, -torch.inf)
            scores += hidden
        return scores.softmax(dim=-1)


class SelfAttention(Attention):
    """Attention over each sequence of the stream: [T/sp, H] to [T/sp, H]. `name` is its name in the model."""

    def __init__(
        self, config: TransformerConfig, *, tp: Axis, sp: Axis, name: str, mask_spec: MaskSpec = CAUSAL
    ) -> None:
        super().__init__(config, tp=tp, name=name, mask_spec=mask_spec)
        self.heads = local_heads(config, tp)
        # Fewer groups than ranks: every rank needs rows that others hold.
        self.is_gathered = config.num_query_groups % tp.size != 0
        features = config.num_attention_heads * config.head_dim
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            features + 2 * config.num_query_groups * config.head_dim,
            tp=tp,
            sp=sp,
            bias=config.has_qkv_bias,
            initial=Initial(std=config.init_std),
            fused=fused_heads(config, (config.heads_per_group, 1, 1)),
        )
        self.has_qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = build_head_norm(config, config.num_attention_heads, tp)
            self.k_norm = build_head_norm(config, config.num_query_groups, tp)
        self.projection = RowParallelLinear(
            features,
            config.hidden_size,
            tp=tp,
            sp=sp,
            bias=config.add_bias_linear,
            initial=Initial(std=config.output_std),
        )

    def forward(self, hidden_TH: Tensor, tokens: Tokens, bias: RelativePositionBias | None = None) -> Tensor:
        """`bias`, its table that of the heads here, is added to scores."""
        fused_TC = self.qkv(hidden_TH, tokens)
        if self.is_gathered:
            fused_TC = differentiable.all_gather(fused_TC, self.tp, dim=-1)
        queries, keys, values = self._split(fused_TC, tokens)
        past = tokens.past
        if past is not None:
            past.update(self.name, keys, values)
        if past is not None and not past.is_first:
            attended = past.attend(
                self.name,
                queries,
                mask_spec=self.mask_spec,
                scale=self.scale,
                bias=bias,
                softcap=self.softcap,
                sinks=self.sinks,
            )
        else:
            attended = self._attended(queries, keys, values, tokens, bias)
        output: Tensor = self.projection(tokens.pad(attended.transpose(1, 2).reshape(tokens.num_real, -1)), tokens)
        return output

    def _split(self, fused_TC: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the own heads, rotated by their positions: [B, heads of each, S, D]."""
        cos_BSR, sin_BSR = (table[..., self.pairs] for table in tokens.rotary_tables(fused_TC.dtype))
        if not self.has_qk_norm:
            split: tuple[Tensor, Tensor, Tensor] = _SplitHeads.apply(
                fused_TC, cos_BSR, sin_BSR, tokens.batch, tokens.num_rows, self.heads
            )
            return split
        # Norms come before the rotation: here nothing rotates.
        queries, keys, values = _SplitHeads.apply(
            fused_TC, cos_BSR[..., :0], sin_BSR[..., :0], tokens.batch, tokens.num_rows, self.heads, True
        )
        cos, sin = cos_BSR.unsqueeze(2), sin_BSR.unsqueeze(2)
        # As [B, S, heads, D] they are contiguous, and norms make no copies.
        queries = rotate(_normed(self.q_norm, queries.transpose(1, 2)), cos, sin).transpose(1, 2)
        keys = rotate(_normed(self.k_norm, keys.transpose(1, 2)), cos, sin).transpose(1, 2)
        return queries, keys, values
