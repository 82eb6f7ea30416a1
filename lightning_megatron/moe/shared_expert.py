"""The shared expert: an MLP that every token goes through besides its routed experts.

It is cut over tp as a dense MLP, sends no token to another rank, and runs while routed tokens are in flight.

T tokens, H hidden, F features of the shared expert.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.mesh import Axis
from lightning_megatron.precision.autocast import autocast
from lightning_megatron.sharding import Fused, Initial, shard_parameter
from lightning_megatron.tensor.activation import GATED, Activation, activate
from lightning_megatron.tensor.linear import ColumnParallelLinear, RowParallelLinear, TokenKeys


class SharedExpert(nn.Module):
    """Shared expert, [T/sp, H] to [T/sp, H]; with a gate its output is scaled by sigmoid(gate . token)."""

    gate: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: Activation,
        has_gate: bool,
        initial: Initial,
        output_initial: Initial,
        tp: Axis,
        sp: Axis,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        is_gated = activation in GATED
        self.up = ColumnParallelLinear(
            hidden_size,
            (2, ffn_hidden_size) if is_gated else ffn_hidden_size,
            tp=tp,
            sp=sp,
            bias=has_bias,
            initial=initial,
            cut=1 if is_gated else 0,
            fused=Fused(shape=(2, ffn_hidden_size), dim=0, sizes=(1, 1)) if is_gated else None,
        )
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, tp=tp, sp=sp, bias=has_bias, initial=output_initial)
        # Replicated over tp; under sequence parallelism each rank sees its own tokens.
        self.gate = shard_parameter((1, hidden_size), initial=initial, replicas=(tp,), partial=sp) if has_gate else None

    def forward(self, hidden_TH: Tensor, tokens: TokenKeys | None = None) -> Tensor:
        """Output [T/sp, H]; `tokens` key the dropout of LoRA adapters inside the linears."""
        output_TH: Tensor = self.down(activate(self.up(hidden_TH, tokens), self.activation), tokens)
        if self.gate is None:
            return output_TH
        wide = torch.promote_types(hidden_TH.dtype, torch.float32)
        # The gate is cheap: float32 whatever the precision, as router scores.
        with autocast(hidden_TH, None):
            share_T1 = torch.sigmoid(F.linear(hidden_TH.to(wide), self.gate.to(wide)))
        return (output_TH * share_T1).to(output_TH.dtype)
