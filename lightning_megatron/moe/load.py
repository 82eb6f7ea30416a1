"""What the routers of a rank saw in a step, and what they do with it when the step is over, once.

A call is recorded under its number within the step: where it is made again for the backward, it says the same again
under the same number, and counts once. Legend: E experts, S sums.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.moe.load_balancing import expert_load


@dataclass
class RoutingRecords:
    """The calls of one router since the last step."""

    counts: dict[int, Tensor] = field(default_factory=dict)
    """By call, of this rank's tokens: int64 [2, E], of which an expert is among the best by score, and among the
    chosen."""
    sums: dict[int, Tensor] = field(default_factory=dict)
    """By call, of this rank's tokens: float64 [S], their weights and each loss."""
    kept: dict[int, Tensor] = field(default_factory=dict)
    """By call, of this rank's tokens: int64 [E], how many choices of each expert stayed."""

    def add(self, call: int, counts_2E: Tensor, sums_S: Tensor) -> None:
        """Keeps what a call saw, in the place of what the same call saw before; all that was chosen stayed."""
        self.counts[call], self.sums[call], self.kept[call] = counts_2E, sums_S.detach(), counts_2E[1]

    def add_kept(self, call: int, kept_E: Tensor) -> None:
        """Says of a call that was added how many choices of each expert stayed, where it has a capacity."""
        self.kept[call] = kept_E

    def forget(self) -> None:
        """Begins anew, as after a step that was skipped."""
        for by_call in (self.counts, self.sums, self.kept):
            by_call.clear()


@dataclass(frozen=True, kw_only=True)
class RoutingReport:
    """What one router did in a step, over the global batch; the same on all ranks that hold it."""

    losses: dict[str, Tensor]
    """By name, "z" or a scope: weighted mean over real tokens, before its coefficient, float64 []."""
    counts_E: Tensor
    """int64: how many real tokens chose each expert."""
    kept_E: Tensor
    """int64: how many of them it took."""

    @property
    def load_E(self) -> Tensor:
        """How busy each expert was by choice, 1 being as busy as the mean: float64."""
        return expert_load(self.counts_E.unsqueeze(0), torch.float64).squeeze(0)

    @property
    def dropped_share(self) -> Tensor:
        """Of all choices, those that no expert took, from 0 to 1; 0 where there was none: float64 []."""
        return (self.counts_E - self.kept_E).sum().double() / self.counts_E.sum().clamp(min=1).double()


class Recorded(Protocol):
    """A router, as seen when a step is over."""

    records: RoutingRecords

    @property
    def num_experts(self) -> int: ...

    @property
    def loss_names(self) -> tuple[str, ...]: ...

    @property
    def device(self) -> torch.device: ...

    def learn(self, preferred_E: Tensor, chosen_E: Tensor) -> None:
        """Takes in the counts of a whole global batch."""
        ...


def end_step(routers: Sequence[Recorded], *, cut: Axis, data: Axis) -> list[RoutingReport]:
    """What each router did in the step that ends, after it has learnt from it: its bias has moved by one step.

    Call it once for each optimizer step, after the last backward, on all ranks that hold these routers; it talks over
    `cut` (which cuts tokens before routers) and `data` (dp+cp), in two messages for all of them. For a step that is
    skipped call `records.forget()`.
    """
    if not routers:
        return []
    counts = [
        torch.cat(
            (
                _total(router.records.counts, (2, router.num_experts), torch.int64, router.device),
                _total(router.records.kept, (1, router.num_experts), torch.int64, router.device),
            )
        )
        for router in routers
    ]
    sums = [_total(r.records.sums, (1 + len(r.loss_names),), torch.float64, r.device) for r in routers]
    all_counts = torch.cat([each.flatten() for each in counts])
    all_sums = torch.cat(sums)
    for axis in (cut, data):
        all_counts, all_sums = collectives.all_reduce(all_counts, axis), collectives.all_reduce(all_sums, axis)
    reports = []
    counts_by_router = all_counts.split([each.numel() for each in counts])
    sums_by_router = all_sums.split([each.numel() for each in sums])
    for router, flat_counts, sums_S in zip(routers, counts_by_router, sums_by_router, strict=True):
        preferred_E, chosen_E, kept_E = flat_counts.view(3, -1)
        router.learn(preferred_E, chosen_E)
        router.records.forget()
        weight, *losses = sums_S
        means = [torch.where(weight > 0, loss / weight, 0.0) for loss in losses]
        named = dict(zip(router.loss_names, means, strict=True))
        reports.append(RoutingReport(losses=named, counts_E=chosen_E.clone(), kept_E=kept_E.clone()))
    return reports


def gather(
    own: Mapping[str, RoutingReport],
    layers: Sequence[str],
    loss_names: Sequence[str],
    num_experts: int,
    *,
    stages: Axis,
    device: torch.device,
) -> dict[str, RoutingReport]:
    """The reports of all `layers`, of which each rank of `stages` has its own, on every rank's host: by layer, in their
    order.

    One message, which a rank of no such layer takes part in. Where no rank has a layer's report it is one of zeros.
    """
    rows_LS = torch.zeros(len(layers), len(loss_names) + 2 * num_experts, dtype=torch.float64, device=device)
    for row_S, layer in zip(rows_LS, layers, strict=True):
        if layer in own:
            report = own[layer]
            losses = [report.losses[name].reshape(1) for name in loss_names]
            row_S.copy_(torch.cat([*losses, report.counts_E.double(), report.kept_E.double()]))
    # Counts stay what they are: float64 has every whole number up to 2^53. On the host, in one go: they are looked at.
    rows_LS = collectives.all_reduce(rows_LS, stages).cpu()
    reports = {}
    for row_S, layer in zip(rows_LS, layers, strict=True):
        losses_S, counts_E, kept_E = row_S.split([len(loss_names), num_experts, num_experts])
        named = dict(zip(loss_names, losses_S, strict=True))
        reports[layer] = RoutingReport(losses=named, counts_E=counts_E.long(), kept_E=kept_E.long())
    return reports


def _total(by_call: dict[int, Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The sum over calls in the order of their numbers, zeros of none."""
    nothing = torch.zeros(shape, dtype=dtype, device=device)
    return torch.stack([nothing, *(by_call[call].view(shape) for call in sorted(by_call))]).sum(0)
