"""Expert load and auxiliary losses of a step: records of routers, and reports.

A call is recorded under its number within the step: a recomputed call has the number it had, and counts once.
E experts, S sums.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.moe.load_balancing import expert_load


@dataclass
class RoutingRecords:
    """Records of one router about its calls since the last step, of this rank's tokens."""

    counts: dict[int, Tensor] = field(default_factory=dict)
    """By call, int64 [2, E]: tokens that have an expert among their top-k by score, and tokens routed to it."""
    sums: dict[int, Tensor] = field(default_factory=dict)
    """By call, float64 [S]: sum of the tokens' weights, and of each auxiliary loss."""
    accepted: dict[int, Tensor] = field(default_factory=dict)
    """By call, int64 [E]: tokens that each expert accepted, dropped ones not counted."""

    def add(self, call: int, counts_2E: Tensor, sums_S: Tensor) -> None:
        """Records a call, in place of an earlier record of the same call; no token counts as dropped."""
        self.counts[call], self.sums[call], self.accepted[call] = counts_2E, sums_S.detach(), counts_2E[1]

    def add_accepted(self, call: int, accepted_E: Tensor) -> None:
        """Records how many tokens each expert accepted in a recorded call, where it has a capacity."""
        self.accepted[call] = accepted_E

    def forget(self) -> None:
        """Drops all records, as after a skipped step."""
        for by_call in (self.counts, self.sums, self.accepted):
            by_call.clear()


@dataclass(frozen=True, kw_only=True)
class RoutingReport:
    """Load and auxiliary losses of one router in a step, over the global batch; equal on all ranks that hold it."""

    losses: dict[str, Tensor]
    """Weighted mean over real tokens of each loss, by name ("z" or a scope), before its coefficient: float64 []."""
    counts_E: Tensor
    """Real tokens routed to each expert: int64."""
    accepted_E: Tensor
    """Tokens that each expert accepted (not dropped): int64."""

    @property
    def load_E(self) -> Tensor:
        """Load of each expert relative to the mean, before dropping: float64."""
        return expert_load(self.counts_E.unsqueeze(0), torch.float64).squeeze(0)

    @property
    def dropped_share(self) -> Tensor:
        """Share of token-expert assignments that were dropped, from 0 to 1: float64 []."""
        return (self.counts_E - self.accepted_E).sum().double() / self.counts_E.sum().clamp(min=1).double()


def gather(
    own: Mapping[str, RoutingReport],
    layers: Sequence[str],
    loss_names: Sequence[str],
    num_experts: int,
    *,
    stages: Axis,
    device: torch.device,
) -> dict[str, RoutingReport]:
    """Reports of all `layers` of all pipeline `stages`, on every rank's host, in the order of `layers`.

    One all-reduce, in which ranks without such layers take part. A report that no rank has is one of zeros.
    """
    rows_LS = torch.zeros(len(layers), len(loss_names) + 2 * num_experts, dtype=torch.float64, device=device)
    for row_S, layer in zip(rows_LS, layers, strict=True):
        if layer in own:
            report = own[layer]
            losses = [report.losses[name].reshape(1) for name in loss_names]
            row_S.copy_(torch.cat([*losses, report.counts_E.double(), report.accepted_E.double()]))
    # float64 holds counts up to 2^53 exactly. One copy to the host, where reports are read.
    rows_LS = collectives.all_reduce(rows_LS, stages).cpu()
    reports = {}
    for row_S, layer in zip(rows_LS, layers, strict=True):
        losses_S, counts_E, accepted_E = row_S.split([len(loss_names), num_experts, num_experts])
        named = dict(zip(loss_names, losses_S, strict=True))
        reports[layer] = RoutingReport(losses=named, counts_E=counts_E.long(), accepted_E=accepted_E.long())
    return reports
