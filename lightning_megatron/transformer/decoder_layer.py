"""Layers of a decoder that looks at an encoder's output: between attention and feed-forward comes cross attention."""

from torch import Tensor

from lightning_megatron.context.attention_step import RelativePositionBias
from lightning_megatron.mesh import Axis
from lightning_megatron.transformer.build import build_norm
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.cross_attention import CachedEncoderMemory, CrossAttention, EncoderMemory
from lightning_megatron.transformer.dropout import Dropout
from lightning_megatron.transformer.layer import TransformerLayer
from lightning_megatron.transformer.tokens import Tokens


class DecoderLayer(TransformerLayer):
    """A decoder layer: self-attention, then x + drop(cross_attention(norm(x), memory)), then the MLP; [T/sp, H] to
    [T/sp, H]."""

    def __init__(self, config: TransformerConfig, *, tp: Axis, sp: Axis, name: str) -> None:
        super().__init__(config, tp=tp, sp=sp, name=name)
        self.cross_norm = build_norm(config, tp=tp, sp=sp)
        self.cross_attention = CrossAttention(config, tp=tp, sp=sp, name=f"{name}.cross_attention")
        self.after_cross = Dropout(config.hidden_dropout, f"{name}.cross_attention")

    def forward(
        self,
        hidden_TH: Tensor,
        tokens: Tokens,
        bias: RelativePositionBias | None = None,
        memory: EncoderMemory | None = None,
        cached: CachedEncoderMemory | None = None,
    ) -> Tensor:
        hidden_TH = self.attend(hidden_TH, tokens, bias)
        cross_TH = self._norm_and(self.cross_norm, lambda x: self.cross_attention(x, tokens, memory, cached), hidden_TH)
        return self.feed_forward(hidden_TH + self.after_cross(cross_TH, tokens), tokens)
