"""The experts of a layer that a rank holds: feed-forward networks, one tensor per matrix, the experts its first dim.

    up     [E, F, H], for swiglu gate and up [E, 2, F, H]      dim 0 cut over ep, F over etp
    down   [E, H, F]                                           the same

What comes out on each rank of etp is a part of a sum. Gradients are summed over edp: each replica of an expert gets the
tokens of its own ep x etp block, and together they are those of all dp x cp x tp ranks, once each. No factor is needed.

The router's weight multiplies between activation and down, in float32 or wider: what comes back is only added up.

E experts, L own ones (E/ep), H hidden, F features of an expert, R rows sorted by expert.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_megatron.mesh import Axis
from lightning_megatron.moe.grouped import GROUPED, GroupedProduct, Groups, grouped_linear
from lightning_megatron.sharding import Initial, shard_parameter
from lightning_megatron.tensor.activation import Activation, activate
from lightning_megatron.tensor.weight_gradients import WeightGradientLayer


class Arrived(NamedTuple):
    """Rows for this rank's experts, sorted by expert."""

    rows_RH: Tensor
    weights_R: Tensor
    # the router's
    groups: Groups


class Experts(WeightGradientLayer):
    """The own experts' feed-forward networks, without biases: rows [R, H] to [R, H], a part of a sum over etp."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: Activation,
        initial: Initial,
        output_initial: Initial,
        ep: Axis,
        etp: Axis,
        edp: Axis,
        product: GroupedProduct = GROUPED,
    ) -> None:
        super().__init__()
        if num_experts % ep.size:
            fits = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
            raise ValueError(
                f"number of experts ({num_experts}) must be a multiple of ep ({ep.size}); ep may be {fits}"
            )
        self.activation, self.product = activation, product
        width = (2, ffn_hidden_size) if activation == "swiglu" else (ffn_hidden_size,)
        self.up = shard_parameter(
            (num_experts, *width, hidden_size), initial=initial, dim=-2, axis=etp, leading=ep, data=edp
        )
        self.down = shard_parameter(
            (num_experts, hidden_size, ffn_hidden_size), initial=output_initial, dim=-1, axis=etp, leading=ep, data=edp
        )

    def forward(self, arrived: Arrived) -> Tensor:
        rows_RH, weights_R, groups = arrived
        up = self._times(rows_RH, self.up, groups)
        return self._times(weigh(activate(up, self.activation), weights_R), self.down, groups)

    def _times(self, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        return grouped_linear(x, weight, groups, gradients=self.weight_gradients, product=self.product)


def weigh(x_RF: Tensor, weights_R: Tensor) -> Tensor:
    """Each row times its weight, multiplied in float32 or wider, in the dtype of the rows."""
    wide = torch.promote_types(torch.promote_types(x_RF.dtype, weights_R.dtype), torch.float32)
    return (x_RF * weights_R[:, None].to(wide)).to(x_RF.dtype)
