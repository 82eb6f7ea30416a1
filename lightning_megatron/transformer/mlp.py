"""The feed-forward half of a layer: a column-parallel linear, an activation of the own features, a row-parallel linear.

Gate and up of swiglu are one weight [2, F, H] cut along F, so that a rank's slice is one slice on every mesh.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Initial
from lightning_megatron.tensor.linear import ColumnParallelLinear, RowKeys, RowParallelLinear
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.recompute import RecomputeLayer, apply_unkept


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up of [T, 2, F]; keeps its input alone, where autograd would keep silu(gate) too."""

    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_T2F)
        gate_TF, up_TF = gate_up_T2F.unbind(1)
        return F.silu(gate_TF).mul_(up_TF)

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> Tensor:
        (gate_up_T2F,) = ctx.saved_tensors
        gate_TF, up_TF = gate_up_T2F.unbind(1)
        grad_gate_up_T2F = torch.empty_like(gate_up_T2F)
        grad_gate_up_T2F[:, 0] = torch.ops.aten.silu_backward(grad_TF * up_TF, gate_TF)
        grad_gate_up_T2F[:, 1] = F.silu(gate_TF).mul_(grad_TF)
        return grad_gate_up_T2F


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up: [T, 2, F] to [T, F]. Source: Shazeer, arXiv 2002.05202, section 2."""
    activated: Tensor = _SwiGLU.apply(gate_up_T2F)
    return activated


class MLP(RecomputeLayer):
    """Two linears with an activation between them: [T/sp, H] to [T/sp, H]."""

    offers = frozenset({"activation"})

    def __init__(self, config: TransformerConfig, *, tp: Axis, sp: Axis) -> None:
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
        )
        self.down = RowParallelLinear(
            width,
            config.hidden_size,
            tp=tp,
            sp=sp,
            bias=config.add_bias_linear,
            initial=Initial(std=config.output_std),
        )

    def forward(self, hidden_TH: Tensor, tokens: RowKeys | None = None) -> Tensor:
        """`tokens` are for what drops inside of the linears."""
        up = self.up(hidden_TH, tokens)
        if "activation" in self.recomputed:
            output: Tensor = apply_unkept(self._activate, lambda x: self.down(x, tokens), up)
        else:
            output = self.down(self._activate(up), tokens)
        return output

    def _activate(self, x: Tensor) -> Tensor:
        if self.activation == "swiglu":
            return swiglu(x)
        return F.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")
