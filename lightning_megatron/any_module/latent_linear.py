"""A linear of DeepSeek's multi-head latent attention whose output is read by heads of each rank."""

import torch
from torch import Tensor, nn

from lightning_megatron.comm import differentiable
from lightning_megatron.mesh import Axis
from lightning_megatron.tensor.weight_gradients import WeightGradients
from lightning_megatron.tensor.whole_linear import WholeLinear


class LatentLinear(WholeLinear):
    """A linear [*, I] to [*, O] that every rank holds whole; the heads of all ranks read the last `rotary` features."""

    def __init__(self, linear: nn.Linear, tp: Axis, rotary: int) -> None:
        nn.Module.__init__(self)
        self.weight_gradients = WeightGradients()
        self.tp, self.rotary = tp, rotary
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, input: Tensor) -> Tensor:
        latent, key = super().forward(input).split((self.out_features - self.rotary, self.rotary), -1)
        return torch.cat((latent, differentiable.copy(key, self.tp)), -1)

    def whole(self) -> nn.Linear:
        """An `nn.Linear` has these weights, as in the network of one device."""
        linear = nn.Linear(self.in_features, self.out_features, device="meta")
        linear.weight = self.weight
        linear.register_parameter("bias", self.bias)
        return linear
