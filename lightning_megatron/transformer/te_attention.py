"""Attention of unsharded sequences by Transformer Engine, which takes cuDNN's or flash attention's kernel, in 16 bits.

It has no parameters, and runs outside of FP8: inside, each of its layers joins the amaxes that ranks agree on, and
which calls come here is not the same on ranks of which some have packed documents. Where Transformer Engine would
materialise S^2 scores for each head, torch's kernels run: for other dtypes than those of 16 bits, and for heads that
some GPU which knows float8 has no kernel for.

B batch, A query heads here, G key-value groups here, S sequence, D head size.
"""

from torch import Tensor, nn

from lightning_megatron.precision import fp8
from lightning_megatron.transformer.attention import SelfAttention
from lightning_megatron.transformer.core_attention import CoreAttention
from lightning_megatron.transformer.sliding_window import Masks

# Of cuDNN's attention on GPUs of compute capability 8.9. Source: cuDNN frontend documentation, scaled dot product
# attention, support surface.
_HEAD_DIM_STEP = 8
_LARGEST_HEAD_DIM = 128


class TECoreAttention:
    """Core attention of a layer by Transformer Engine; the layer's former core attention takes what it cannot."""

    def __init__(self, attention: SelfAttention) -> None:
        self._torch: CoreAttention = attention.core_attention
        heads, tp = attention.heads, attention.tp
        self._has_kernel = heads.head_dim % _HEAD_DIM_STEP == 0 and heads.head_dim <= _LARGEST_HEAD_DIM
        self._engine: nn.Module = fp8.attention(
            # Where tp has more ranks than groups, a rank has one group of its own among those of all ranks.
            heads.num_heads * tp.size,
            heads.head_dim,
            num_groups=heads.num_groups * tp.size,
            is_causal=attention.mask_spec.is_causal,
            window=attention.mask_spec.window,
            tp=tp,
            sp=attention.qkv.sp,
            qkv_format="bshd",
            softmax_scale=attention.scale,
        )

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Tensor:
        if not self._has_kernel or queries.dtype.itemsize != 2:
            return self._torch(queries, keys, values, masks)
        with fp8.left_out():
            attended_BSC = self._engine(*(x.transpose(1, 2) for x in (queries, keys, values)))
        attended: Tensor = attended_BSC.unflatten(-1, (queries.shape[1], -1)).transpose(1, 2)
        return attended
