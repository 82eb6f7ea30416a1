"""The feed-forward half of a layer: a column-parallel linear, an activation of the own features, a row-parallel linear.

Gate and up of a gated one are one weight [2, F, H] cut along F, so that a rank's slice is one slice on every mesh.
"""

from torch import Tensor

from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Fused, Initial
from lightning_megatron.tensor.activation import activate
from lightning_megatron.tensor.linear import ColumnParallelLinear, RowParallelLinear, TokenKeys
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.dropout import ShardedDropout
from lightning_megatron.transformer.recompute import RecomputeLayer, apply_recomputed


class MLP(RecomputeLayer):
    """Two linears with an activation between them: [T/sp, H] to [T/sp, H]. `name` is its name in the model."""

    recomputable = frozenset({"activation"})

    def __init__(self, config: TransformerConfig, *, tp: Axis, sp: Axis, name: str) -> None:
        super().__init__()
        self.activation = config.activation
        width = config.ffn_hidden_size
        self.up = ColumnParallelLinear(
            config.hidden_size,
            (2, width) if config.is_gated else width,
            tp=tp,
            sp=sp,
            bias=config.add_bias_linear,
            initial=Initial(std=config.init_std),
            cut=1 if config.is_gated else 0,
            fused=Fused(shape=(2, width), dim=0, sizes=(1, 1)) if config.is_gated else None,
        )
        self.dropout = ShardedDropout(config.ffn_dropout, name, first_column=tp.rank * (width // tp.size))
        self.down = RowParallelLinear(
            width,
            config.hidden_size,
            tp=tp,
            sp=sp,
            bias=config.add_bias_linear,
            initial=Initial(std=config.output_std),
        )

    def forward(self, hidden_TH: Tensor, tokens: TokenKeys | None = None) -> Tensor:
        """`tokens` are for what drops between and inside of the linears."""
        up = self.up(hidden_TH, tokens)
        if "activation" in self.recomputed:
            output: Tensor = apply_recomputed(lambda x: self._activate(x, tokens), lambda x: self.down(x, tokens), up)
        else:
            output = self.down(self._activate(up, tokens), tokens)
        return output

    def _activate(self, x: Tensor, tokens: TokenKeys | None) -> Tensor:
        activated = activate(x, self.activation)
        return activated if tokens is None else self.dropout(activated, tokens)
