"""The microbatches of each training step: a batch cut along its rows, or those of a plan."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.trainer.dynamic_context.prefetch import DynamicContext
from lightning_megatron.trainer.step.batch_checks import BatchChecks
from lightning_megatron.trainer.step.microbatches import Cutting, StepBatch, as_planned, cut_evenly, rows_of
from lightning_megatron.trainer.step.user_step import UserStep


@dataclass(frozen=True, kw_only=True, eq=False)
class StepBatches:
    """Cuts a data-parallel rank's batch into the microbatches of a step: along its rows, or as a plan says."""

    user_step: UserStep
    mesh: Mesh
    device: torch.device
    cutting: Cutting
    linked: Axis
    """Data-parallel ranks that make each model call together."""
    checks: BatchChecks
    prefetch: DynamicContext | None

    @property
    def are_planned(self) -> bool:
        """Whether dynamic context parallelism plans every step."""
        return self.prefetch is not None

    def cut(self, batch: Any) -> list[StepBatch]:
        """The microbatches of a step for this rank, on its device; checked for being the same on all that run them."""
        if self.prefetch is None:
            self.checks.check("training_step", batch, self.mesh.axis("pp+cp+tp"))
            parts = self._cut_evenly(batch, self.cutting.count_of(rows_of(batch)))
            # A last batch of few rows has fewer, and may have them on one data-parallel rank alone.
            count = self._agreed(len(parts))
            return parts if count == len(parts) else self._cut_evenly(batch, count)
        planned = self.prefetch.take(self.user_step.trainer.fit_loop.batch_idx, batch)
        parts = as_planned(planned.microbatches, planned.num_rows, self.mesh)
        # The cp ranks run different microbatches of a plan; that they read the same data is checked before planning.
        self.checks.check("training_step", [(part.batch, part.documents) for part in parts], self.mesh.axis("pp+tp"))
        return [replace(part, batch=self._handed_over(part.batch)) for part in parts]

    def _cut_evenly(self, batch: Any, num_microbatches: int) -> list[StepBatch]:
        share = self.user_step.share
        first = None if share is None else share.first_row
        return cut_evenly(batch, num_microbatches, self.mesh, first, self.user_step.num_copies)

    def count_of(self, rows: int) -> int:
        """Microbatches of one model call on so many rows. Collective over the dp ranks that share experts."""
        return self._agreed(max(1, min(self.cutting.count_of(rows), rows)))

    def _agreed(self, num_microbatches: int) -> int:
        """The number of microbatches that all data-parallel ranks with joint model calls can have."""
        if self.linked.size == 1 or self.cutting.is_whole:
            return num_microbatches
        own = torch.tensor(num_microbatches, device=self.device)
        return int(collectives.all_reduce(own, self.linked, "min").item())

    def _handed_over(self, batch: Any) -> Any:
        """A batch of a plan as Lightning hands over that of a loader: converted, through the hooks, on the device."""
        trainer, module = self.user_step.trainer, self.user_step.module
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)
