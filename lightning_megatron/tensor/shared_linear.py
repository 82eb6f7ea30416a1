"""A linear whose weight every rank of `tp` holds whole, for what its heads share: latents of queries, keys and values.

It runs on this rank's part of the tokens, before they are gathered, so that ranks exchange its few outputs and not its
many inputs. Under sequence parallelism the gradients of the weight are partial sums over the ranks' tokens.

T tokens, I features in, O features out.
"""

from torch import Tensor

from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Fused, Initial, shard_parameter
from lightning_megatron.tensor.linear import ParallelLinear, TokenKeys, column_parallel_linear


class SharedLinear(ParallelLinear):
    """Linear without a bias, [T/sp, in_features] to [T/sp, out_features], whose weight is replicated over `tp`."""

    def __init__(
        self, in_features: int, out_features: int, *, tp: Axis, sp: Axis, initial: Initial, fused: Fused | None = None
    ) -> None:
        # Its products are a rank's own; what it casts to FP8 are parts of tensors that sp cuts.
        alone = Axis.alone(tp.ranks[tp.rank])
        super().__init__(alone, alone, input_axis=sp, gradient_axis=sp)
        shape = (out_features, in_features)
        self.weight = shard_parameter(shape, initial=initial, replicas=(tp,), partial=sp, fused=fused)
        self.bias = None

    def forward(self, x_TI: Tensor, tokens: TokenKeys | None = None) -> Tensor:
        return self._output(column_parallel_linear, x_TI, tokens)
