"""Post-norm transformer layers, as those of BERT: each half is added to the residual stream, and the sum is normed.

    x = norm(x + drop(attention(x)))
    x = norm(x + drop(mlp(x)))

The residual stream is normed already; there is no norm after the last layer. Module names are those of a pre-norm
layer. Dims: T tokens, H hidden.
"""

from torch import Tensor

from lightning_megatron.context.context_layout import MaskSpec
from lightning_megatron.mesh import Axis
from lightning_megatron.transformer.attention import CAUSAL
from lightning_megatron.transformer.build import build_attention, build_mlp, build_norm
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.dropout import Dropout
from lightning_megatron.transformer.recompute import RecomputeLayer, checkpoint
from lightning_megatron.transformer.tokens import Tokens


class PostNormLayer(RecomputeLayer):
    """A dense layer: [T/sp, H] to [T/sp, H]. `name` is its name in the model: it names the dropout masks."""

    recomputable = frozenset({"mlp"})

    def __init__(
        self, config: TransformerConfig, *, tp: Axis, sp: Axis, name: str, mask_spec: MaskSpec = CAUSAL
    ) -> None:
        super().__init__()
        self.attention = build_attention(config, tp=tp, sp=sp, name=f"{name}.attention", mask_spec=mask_spec)
        self.after_attention = Dropout(config.hidden_dropout, f"{name}.attention")
        self.attention_norm = build_norm(config, tp=tp, sp=sp)
        self.mlp = build_mlp(config, tp=tp, sp=sp, name=f"{name}.mlp")
        self.after_mlp = Dropout(config.hidden_dropout, f"{name}.mlp")
        self.mlp_norm = build_norm(config, tp=tp, sp=sp)

    def forward(self, hidden_TH: Tensor, tokens: Tokens) -> Tensor:
        attended_TH = self.attention(hidden_TH, tokens)
        hidden_TH = self.attention_norm(hidden_TH + self.after_attention(attended_TH, tokens))
        if "mlp" in self.recomputed:
            fed_TH: Tensor = checkpoint(lambda x: self.mlp(x, tokens), hidden_TH)
        else:
            fed_TH = self.mlp(hidden_TH, tokens)
        output_TH: Tensor = self.mlp_norm(hidden_TH + self.after_mlp(fed_TH, tokens))
        return output_TH
