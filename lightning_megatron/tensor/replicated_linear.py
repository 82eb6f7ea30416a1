"""A linear layer that is replicated over `tp`: a small one, which is not worth communication.

Dims: T tokens, or samples, I features in, O features out.
"""

from torch import Tensor

from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Initial, shard_parameter
from lightning_megatron.tensor.linear import column_parallel_linear
from lightning_megatron.tensor.weight_gradients import WeightGradientLayer

# What it multiplies is cut over no axis.
_ALONE = Axis.alone(0)


class ReplicatedLinear(WeightGradientLayer):
    """Replicated linear, [T, in_features] to [T, out_features]; weight [out, in].

    `partial` is the axis whose ranks see different tokens, so that gradients are partial sums over it; None where all
    ranks of `tp` see the same tokens.
    """

    def __init__(
        self, in_features: int, out_features: int, *, tp: Axis, partial: Axis | None, initial: Initial
    ) -> None:
        super().__init__()
        self.weight = shard_parameter((out_features, in_features), initial=initial, replicas=(tp,), partial=partial)
        self.bias = shard_parameter((out_features,), initial=Initial(), replicas=(tp,), partial=partial)

    def forward(self, x_TI: Tensor) -> Tensor:
        gradients = self.weight_gradients
        return column_parallel_linear(x_TI, self.weight, self.bias, tp=_ALONE, sp=_ALONE, gradients=gradients)
