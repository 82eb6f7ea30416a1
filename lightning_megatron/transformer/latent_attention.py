"""Multi-head latent attention (MLA): queries, keys and values of all heads are made of small latents.

    hidden [T/sp, H] ── query_down ── norm ── query_up ──────────── queries       (nope | rope) of each own head
                    └── key_value_down ─┬─ norm ── key_value_up ─── keys (nope) and values of each own head
                                        └─ rotated ──────────────── keys (rope), the same for all heads

The down projections are replicated over tp and run on this rank's tokens; the up projections are column-parallel, so
that under sequence parallelism tp gathers latents and not hidden states.

Generation caches the normed latent and the rotated key, one of each for a token, whatever the number of heads. Later
calls attend to them without making keys and values: q . (U_k c) = (U_k^T q) . c, and sum w (U_v c) = U_v (sum w c).

B batch, S sequence, N tokens of a sample here, T tokens, H hidden, A heads here, C features of the latent of keys and
values, R rotated features, P features of a head that are not rotated, D features of a head's values.
Source: DeepSeek-AI, arXiv 2405.04434, section 2.1 and appendix C.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.comm import differentiable
from lightning_megatron.context.attention_step import RelativePositionBias
from lightning_megatron.context.cache import CachedCall
from lightning_megatron.context.context_layout import MaskSpec
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Fused, Initial
from lightning_megatron.tensor.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.tensor.lora_adapter import LoRAAdapter
from lightning_megatron.tensor.norm import RMSNorm
from lightning_megatron.tensor.shared_linear import SharedLinear
from lightning_megatron.transformer.attention import CAUSAL, Attention
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.latent_config import LatentConfig
from lightning_megatron.transformer.rotary import rotate
from lightning_megatron.transformer.tokens import Tokens


class LatentAttention(Attention):
    """Attention over each sequence of the stream: [T/sp, H] to [T/sp, H]. `name` is its name in the model."""

    def __init__(
        self,
        config: TransformerConfig,
        latent: LatentConfig,
        *,
        tp: Axis,
        sp: Axis,
        name: str,
        mask_spec: MaskSpec = CAUSAL,
    ) -> None:
        super().__init__(config, tp=tp, name=name, mask_spec=mask_spec)
        heads, hidden, initial = config.num_attention_heads, config.hidden_size, Initial(std=config.init_std)
        self.latent, self.num_heads, self.sp = latent, heads // tp.size, sp
        per_head = latent.qk_nope_head_dim, latent.v_head_dim
        query_inputs = latent.q_lora_rank or hidden
        queries = ColumnParallelLinear(
            query_inputs, heads * latent.qk_head_dim, tp=tp, sp=sp, bias=False, initial=initial
        )
        if latent.q_lora_rank:
            self.query_down = SharedLinear(hidden, latent.q_lora_rank, tp=tp, sp=sp, initial=initial)
            self.query_norm = RMSNorm(latent.q_lora_rank, eps=latent.norm_epsilon, tp=tp, sp=sp)
            self.query_up = queries
        else:
            self.query = queries
        sizes = latent.kv_lora_rank, latent.qk_rope_head_dim
        self.key_value_down = SharedLinear(
            hidden, sum(sizes), tp=tp, sp=sp, initial=initial, fused=Fused(shape=(sum(sizes),), dim=0, sizes=sizes)
        )
        self.key_value_norm = RMSNorm(latent.kv_lora_rank, eps=latent.norm_epsilon, tp=tp, sp=sp)
        self.key_value_up = ColumnParallelLinear(
            latent.kv_lora_rank,
            heads * sum(per_head),
            tp=tp,
            sp=sp,
            bias=False,
            initial=initial,
            fused=Fused(shape=(heads, sum(per_head)), dim=1, sizes=per_head),
        )
        self.projection = RowParallelLinear(
            heads * latent.v_head_dim, hidden, tp=tp, sp=sp, bias=False, initial=Initial(std=config.output_std)
        )

    def forward(self, hidden_TH: Tensor, tokens: Tokens, bias: RelativePositionBias | None = None) -> Tensor:
        assert bias is None, "distances have no bias where positions are rotary"
        latent_TC, shared_TR = self.key_value_down(hidden_TH, tokens).split(
            [self.latent.kv_lora_rank, self.latent.qk_rope_head_dim], dim=-1
        )
        latent_TC = self.key_value_norm(latent_TC)
        queries = self._queries(hidden_TH, tokens)
        # Each rank's heads have gradients for it, which are summed.
        shared_TR = differentiable.all_gather(differentiable.copy(shared_TR, self._copied), self.sp)
        shared_BNR = self._rotate(self._real(shared_TR, tokens).unsqueeze(2), tokens).squeeze(2)
        past = tokens.past
        if past is not None:
            past.update(self.name, *self._cached(latent_TC, shared_BNR, tokens))
        if past is not None and not past.is_first:
            attended = self._attend_to_latents(queries, past)
        else:
            attended = self._attend(queries, latent_TC, shared_BNR, tokens)
        output: Tensor = self.projection(tokens.pad(attended.transpose(1, 2).reshape(tokens.num_real, -1)), tokens)
        return output

    @property
    def _copied(self) -> Axis:
        """Axis whose ranks hold the same tokens outside of the tensor-parallel region."""
        return self.tp if self.sp.size < self.tp.size else Axis.alone(self.tp.ranks[self.tp.rank])

    def _real(self, x_TF: Tensor, tokens: Tokens) -> Tensor:
        """The real tokens' features: [B, N, features]."""
        return x_TF[: tokens.num_real].view(tokens.batch, tokens.num_rows, -1)

    def _rotate(self, x_BNAR: Tensor, tokens: Tokens) -> Tensor:
        cos, sin = (table[..., self.pairs].unsqueeze(2) for table in tokens.rotary_tables(x_BNAR.dtype))
        return rotate(x_BNAR.contiguous(), cos, sin)

    def _queries(self, hidden_TH: Tensor, tokens: Tokens) -> Tensor:
        """Queries of the own heads, rotated: [B, A, N, P + R]."""
        if self.latent.q_lora_rank:
            queries_TF = self.query_up(self.query_norm(self.query_down(hidden_TH, tokens)), tokens)
        else:
            queries_TF = self.query(hidden_TH, tokens)
        queries = self._real(queries_TF, tokens).unflatten(-1, (self.num_heads, -1))
        plain, turned = queries.split([self.latent.qk_nope_head_dim, self.latent.qk_rope_head_dim], dim=-1)
        return torch.cat((plain, self._rotate(turned, tokens)), dim=-1).transpose(1, 2)

    def _attend(self, queries: Tensor, latent_TC: Tensor, shared_BNR: Tensor, tokens: Tokens) -> Tensor:
        """Attention to keys and values that are made of this call's latents: [B, A, N, D]."""
        latent = self.latent
        made = self._real(self.key_value_up(latent_TC, tokens), tokens).unflatten(-1, (self.num_heads, -1))
        plain, values = made.split([latent.qk_nope_head_dim, latent.v_head_dim], dim=-1)
        shared = shared_BNR.unsqueeze(2).expand(-1, -1, self.num_heads, -1)
        keys = torch.cat((plain, shared), dim=-1).transpose(1, 2)
        # Kernels take heads of one size.
        width = max(latent.qk_head_dim, latent.v_head_dim)
        queries, keys, values = (F.pad(x, (0, width - x.shape[-1])) for x in (queries, keys, values.transpose(1, 2)))
        return self._attended(queries, keys, values, tokens)[..., : latent.v_head_dim]

    def _cached(self, latent_TC: Tensor, shared_BNR: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """What is cached, as keys of one head: [B, 1, N, C + R]; values are a part of it."""
        latent_BNC = self._real(differentiable.all_gather(latent_TC, self.sp), tokens)
        keys = torch.cat((latent_BNC, shared_BNR), dim=-1).unsqueeze(1)
        return keys, keys[..., :0]

    def _attend_to_latents(self, queries: Tensor, past: CachedCall) -> Tensor:
        """Attention of [B, A, N, P + R] to all that is cached: [B, A, N, D]."""
        latent = self.latent
        weight: Tensor = self.key_value_up.weight
        if isinstance(self.key_value_up.lora, LoRAAdapter):
            weight = weight + self.key_value_up.lora.product().to(weight.dtype)
        # Sizes of heads, not of ranks: each has its own heads.
        to_keys, to_values = weight.unflatten(0, (self.num_heads, -1)).split(
            [latent.qk_nope_head_dim, latent.v_head_dim], dim=1
        )
        plain, turned = queries.split([latent.qk_nope_head_dim, latent.qk_rope_head_dim], dim=-1)
        asked = torch.cat((plain @ to_keys.to(plain.dtype), turned), dim=-1)
        found = past.attend(
            self.name,
            asked,
            mask_spec=self.mask_spec,
            scale=self.scale,
            value_dim=latent.kv_lora_rank,
        )
        attended: Tensor = found @ to_values.to(found.dtype).transpose(1, 2)
        return attended
