"""What the routers of a rank saw in a step, and what they do with it when the step is over, once.

A call is recorded under its number within the step: where it is made again for the backward, it says the same again
under the same number, and counts once. Legend: E experts, S sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis


@dataclass
class Records:
    """The calls of one router since the last step."""

    counts: dict[int, Tensor] = field(default_factory=dict)
    # by call, of this rank's tokens: int64 [2, E], of which an expert is among the best by score, and among the chosen
    sums: dict[int, Tensor] = field(default_factory=dict)
    # by call, of this rank's tokens: float64 [S], their number and each loss

    def add(self, call: int, counts_2E: Tensor, sums_S: Tensor) -> None:
        """Keeps what a call saw, in the place of what the same call saw before."""
        self.counts[call], self.sums[call] = counts_2E, sums_S.detach()

    def forget(self) -> None:
        """Begins anew, as after a step that was skipped."""
        self.counts.clear()
        self.sums.clear()


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one router did in a step, over the global batch; the same on all ranks that hold it."""

    losses: dict[str, Tensor]
    # by name, "z" or a scope: mean over real tokens, before its coefficient, float64 []
    counts_E: Tensor
    # int64: how many real tokens chose each expert


class Recorded(Protocol):
    """A router, as seen when a step is over."""

    records: Records

    @property
    def num_experts(self) -> int: ...

    @property
    def loss_names(self) -> tuple[str, ...]: ...

    @property
    def device(self) -> torch.device: ...

    def learn(self, preferred_E: Tensor, chosen_E: Tensor) -> None:
        """Takes in the counts of a whole global batch."""
        ...


def end_step(routers: Sequence[Recorded], *, sp: Axis, data: Axis) -> list[Report]:
    """What each router did in the step that ends, after it has learnt from it: its bias has moved by one step.

    Call it once for each optimizer step, after the last backward, on all ranks that hold these routers; it talks over
    `sp` and `data` (dp+cp), in two messages for all of them. For a step that is skipped call `records.forget()`.
    """
    if not routers:
        return []
    counts = [_total(r.records.counts, (2, r.num_experts), torch.int64, r.device) for r in routers]
    sums = [_total(r.records.sums, (1 + len(r.loss_names),), torch.float64, r.device) for r in routers]
    all_counts = torch.cat([each.flatten() for each in counts])
    all_sums = torch.cat(sums)
    for axis in (sp, data):
        all_counts, all_sums = collectives.all_reduce(all_counts, axis), collectives.all_reduce(all_sums, axis)
    reports = []
    counts_by_router = all_counts.split([each.numel() for each in counts])
    sums_by_router = all_sums.split([each.numel() for each in sums])
    for router, flat_counts, sums_S in zip(routers, counts_by_router, sums_by_router, strict=True):
        preferred_E, chosen_E = flat_counts.view(2, -1)
        router.learn(preferred_E, chosen_E)
        router.records.forget()
        num_tokens, *losses = sums_S
        means = [loss / num_tokens.clamp(min=1.0) for loss in losses]
        reports.append(Report(losses=dict(zip(router.loss_names, means, strict=True)), counts_E=chosen_E.clone()))
    return reports


def _total(by_call: dict[int, Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The sum over calls in the order of their numbers, zeros of none."""
    total = torch.zeros(shape, dtype=dtype, device=device)
    for call in sorted(by_call):
        total += by_call[call]
    return total
