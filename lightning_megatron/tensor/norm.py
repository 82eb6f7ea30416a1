"""Layer norm and RMS norm over the hidden dim, on activations that may be cut over `sp`.

The parameters are replicated over `tp`; under sequence parallelism each rank sees its T/sp tokens alone, so
their gradients are partial sums. torch's kernels work in float32 on half inputs and round the result once; they want
input and parameters in one dtype, the wider of the two. Dims: H hidden.
Source: Ba et al., arXiv 1607.06450; Zhang and Sennrich, arXiv 1910.07467.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Initial, shard_parameter


class LayerNorm(nn.Module):
    """Layer norm of [..., H] along H, scaled and shifted; dtype as the input."""

    def __init__(self, hidden_size: int, *, eps: float, tp: Axis, sp: Axis) -> None:
        super().__init__()
        self.eps = eps
        self.weight = shard_parameter((hidden_size,), initial=Initial(mean=1.0), replicas=(tp,), partial=sp)
        self.bias = shard_parameter((hidden_size,), initial=Initial(), replicas=(tp,), partial=sp)

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        return F.layer_norm(x.to(dtype), weight.shape, weight, bias, self.eps).to(x.dtype)


class RMSNorm(nn.Module):
    """RMS norm of [..., H] along H, scaled; dtype as the input."""

    def __init__(self, hidden_size: int, *, eps: float, tp: Axis, sp: Axis) -> None:
        super().__init__()
        self.eps = eps
        self.weight = shard_parameter((hidden_size,), initial=Initial(mean=1.0), replicas=(tp,), partial=sp)

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        wide, weight = x.to(dtype), self.weight.to(dtype)
        if x.is_meta:
            # A GPU runs one kernel that saves its input alone, as the layer norm kernel does here (and a mean).
            return F.layer_norm(wide, weight.shape, weight, None, self.eps).to(x.dtype)
        return F.rms_norm(wide, weight.shape, weight, self.eps).to(x.dtype)
