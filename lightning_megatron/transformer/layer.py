"""One pre-norm transformer layer: attention and feed-forward, each added to the residual stream."""

from torch import Tensor, nn

from lightning_megatron.mesh import Axis
from lightning_megatron.tensor.norm import LayerNorm, RMSNorm
from lightning_megatron.transformer.attention import SelfAttention
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.dropout import Dropout
from lightning_megatron.transformer.mlp import MLP
from lightning_megatron.transformer.tokens import Tokens


def build_norm(config: TransformerConfig, *, tp: Axis, sp: Axis) -> LayerNorm | RMSNorm:
    """A norm of hidden states [T/sp, H] of the kind that the configuration asks for."""
    kind = LayerNorm if config.normalization == "layernorm" else RMSNorm
    return kind(config.hidden_size, eps=config.norm_epsilon, tp=tp, sp=sp)


class TransformerLayer(nn.Module):
    """x + drop(attention(norm(x))), then x + drop(mlp(norm(x))): [T/sp, H] to [T/sp, H].

    `name` is the layer's name in the model: it names the dropout masks.
    """

    def __init__(self, config: TransformerConfig, *, tp: Axis, sp: Axis, name: str, is_causal: bool = True) -> None:
        super().__init__()
        self.attention_norm = build_norm(config, tp=tp, sp=sp)
        self.attention = SelfAttention(config, tp=tp, sp=sp, name=f"{name}.attention", is_causal=is_causal)
        self.after_attention = Dropout(config.hidden_dropout, f"{name}.attention")
        self.mlp_norm = build_norm(config, tp=tp, sp=sp)
        self.mlp = MLP(config, tp=tp, sp=sp)
        self.after_mlp = Dropout(config.hidden_dropout, f"{name}.mlp")

    def forward(self, hidden_TH: Tensor, tokens: Tokens) -> Tensor:
        attended_TH = self.attention(self.attention_norm(hidden_TH), tokens)
        hidden_TH = hidden_TH + self.after_attention(attended_TH, tokens)
        output_TH: Tensor = hidden_TH + self.after_mlp(self.mlp(self.mlp_norm(hidden_TH)), tokens)
        return output_TH
