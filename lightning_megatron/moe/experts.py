"""The experts of a layer that a rank holds: MLPs, one tensor per matrix, the experts its first dim.

    up          [E, F, H], for gated ones gate and up [E, 2, F, H]      dim 0 cut over ep, F over etp
    down        [E, H, F]                                           the same
    up_bias     [E, F] or [E, 2, F]                                 the same
    down_bias   [E, H]                                              dim 0 cut over ep, replicated over etp

The output on each rank of etp is a partial sum, to which the first of them adds the second bias. Gradients are summed
over edp: each copy of an expert gets the tokens of its own ep x etp block, and the blocks together are all
dp x cp x tp ranks, once each, so no factor is needed. All ranks of etp have the full gradient of the second bias: they
see the same tokens, and the same gradient of the sum.

Router probabilities scale the activation and the second bias, in float32 or wider, so combine only adds rows up.

E experts, L own ones (E/ep), H hidden, F features of an expert, R rows sorted by expert.
"""

from typing import NamedTuple

from torch import Tensor, nn

from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.moe.grouped_gemm import GROUPED_GEMM, ExpertGemm, ExpertGroups, GroupedBias, grouped_linear
from lightning_megatron.moe.weighted_activation import weighted_activation
from lightning_megatron.sharding import Fused, Initial, shard_parameter
from lightning_megatron.tensor.activation import GATED, Activation
from lightning_megatron.tensor.weight_gradients import WeightGradientLayer


class DispatchedTokens(NamedTuple):
    """Rows for this rank's experts, sorted by expert, as a dispatcher delivers them."""

    rows_RH: Tensor
    probs_R: Tensor
    """Router probability of each row."""
    groups: ExpertGroups


class ExpertAxes(NamedTuple):
    """The axes of experts: expert parallel, expert tensor parallel, and expert data parallel."""

    ep: Axis
    etp: Axis
    edp: Axis

    @staticmethod
    def of(mesh: Mesh) -> "ExpertAxes":
        """The expert axes of a mesh."""
        return ExpertAxes(mesh.axis("ep"), mesh.axis("etp"), mesh.axis("edp"))


class Experts(WeightGradientLayer):
    """MLPs of this rank's experts: rows [R, H] to [R, H], a partial sum over etp."""

    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: Activation,
        initial: Initial,
        output_initial: Initial,
        axes: ExpertAxes,
        has_bias: bool = False,
        gemm: ExpertGemm = GROUPED_GEMM,
    ) -> None:
        super().__init__()
        ep, etp, edp = axes
        if num_experts % ep.size:
            fits = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
            raise ValueError(
                f"number of experts ({num_experts}) must be a multiple of ep ({ep.size}); ep may be {fits}"
            )
        self.activation, self.axes = activation, axes
        # The configured GEMM, and the GEMM of each matrix, which float8 replaces.
        self.gemm = self.up_gemm = self.down_gemm = gemm
        width = (2, ffn_hidden_size) if activation in GATED else (ffn_hidden_size,)
        fused = Fused(shape=width, dim=0, sizes=(1, 1)) if activation in GATED else None
        self.up = shard_parameter(
            (num_experts, *width, hidden_size), initial=initial, dim=-2, axis=etp, leading=ep, data=edp, fused=fused
        )
        self.down = shard_parameter(
            (num_experts, hidden_size, ffn_hidden_size), initial=output_initial, dim=-1, axis=etp, leading=ep, data=edp
        )
        self.up_bias = self.down_bias = None
        if has_bias:
            self.up_bias = shard_parameter(
                (num_experts, *width), initial=Initial(), dim=-1, axis=etp, leading=ep, data=edp
            )
            self.down_bias = shard_parameter(
                (num_experts, hidden_size), initial=Initial(), replicas=(etp,), leading=ep, data=edp
            )

    def forward(self, tokens: DispatchedTokens) -> Tensor:
        rows_RH, probs_R, groups = tokens
        up_bias = down_bias = None
        if self.up_bias is not None and self.down_bias is not None:
            up_bias = GroupedBias(self.up_bias)
            down_bias = GroupedBias(self.down_bias, probs_R, is_own=self.axes.etp.is_first)
        up = self._times(rows_RH, self.up, groups, self.up_gemm, up_bias)
        weighed_RF = weighted_activation(up, probs_R, self.activation)
        return self._times(weighed_RF, self.down, groups, self.down_gemm, down_bias)

    def _times(
        self, x: Tensor, weight: Tensor, groups: ExpertGroups, gemm: ExpertGemm, bias: GroupedBias | None
    ) -> Tensor:
        return grouped_linear(x, weight, groups, gradients=self.weight_gradients, gemm=gemm, bias=bias)
