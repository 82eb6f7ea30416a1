"""A training step under a pipeline schedule: the batch is cut, the schedule runs, what was logged is replayed.

microbatches of the batch ─► Runtime.run ─► ScheduledCall.forward ─► ScheduledStep._enter ─► the user's step
StepLog.replay ◄─ end of the schedule       ScheduledCall.backward ◄─ loss x weight ◄──────────────┘
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.loss_scale import LossScale
from lightning_megatron.pipeline.microbatches import map_tensors
from lightning_megatron.pipeline.module import Driver
from lightning_megatron.pipeline.plans import training_plan
from lightning_megatron.pipeline.runtime import Runtime
from lightning_megatron.pipeline.scheduled import ScheduledCall, StageExit
from lightning_megatron.trainer.config import PipelineConfig
from lightning_megatron.trainer.step import step_checks
from lightning_megatron.trainer.step.coupled_rows import RowCheck
from lightning_megatron.trainer.step.microbatches import StepBatch
from lightning_megatron.trainer.step.rng_sync import kept_random
from lightning_megatron.trainer.step.step_batches import StepBatches
from lightning_megatron.trainer.step.step_checks import HookWatch, LossCheck, StateWatch
from lightning_megatron.trainer.step.step_gradients import StepGradients
from lightning_megatron.trainer.step.step_log import StepLog
from lightning_megatron.trainer.step.user_step import (
    OWN_KEYS,
    Context,
    UserStep,
    loss_of,
    loss_reduction_of,
    no_loss,
)


@dataclass(kw_only=True, eq=False)
class ScheduledStep:
    """Training steps whose microbatches and stages a schedule orders."""

    user_step: UserStep
    runtime: Runtime
    log: StepLog
    mesh: Mesh
    pipeline: PipelineConfig
    batches: StepBatches
    driver_between: Driver
    """Driver of the models' calls outside a schedule."""
    loss_check: LossCheck
    state_watch: StateWatch
    hook_watch: HookWatch
    row_check: RowCheck
    is_running: bool = False
    _told: set[str] = field(default_factory=set)
    """Further outputs of the step that were told of."""

    def run(
        self, gradients: StepGradients, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Tensor]:
        """The loss of the global batch; its gradients are left to `gradients`."""
        user_step, sizes = self.user_step, self.mesh.sizes
        parts = self.batches.cut(args[0])
        schedule = self.pipeline.schedule_of(pp=sizes.pp, vp=sizes.vp, microbatches=len(parts))
        call = ScheduledCall(
            user_step.models,
            self.mesh,
            # Each microbatch seeds the generators anew.
            partial(self._enter, parts, torch.initial_seed(), gradients, context, args, kwargs),
            partial(user_step.trainer.strategy.precision_plugin.backward, model=user_step.module, optimizer=None),
            [part.first_sample for part in parts],
            gradients.weight_gradients.opened,
            gradients.dp_comm,
        )
        num_updates = self._num_updates()
        is_first = gradients.loss_scale is not None and gradients.loss_scale.usual_weight is None
        with gradients.scheduled():
            user_step.drive(call)
            self.is_running = True
            try:
                with self.log.recording(), kept_random(), self._guarded(len(parts)):
                    self.runtime.run(training_plan(schedule), call)
            finally:
                self.is_running = False
                user_step.drive(self.driver_between)
                user_step.end_microbatches()
                self.log.num_copies = self.mesh.cp.size
        if self.batches.are_planned:
            self._refuse_metrics(num_updates)
        if is_first:
            assert gradients.loss_scale is not None
            self._share_expected(gradients.loss_scale)
        summary = self.log.replay(user_step.whereabouts)
        gradients.weigh_scheduled(summary.weight)
        self.loss_check.check(summary.loss)
        return {**summary.outputs, "loss": summary.loss.to(self.log.dtype)}

    def _expect_weight(self, loss_scale: LossScale, weight: Tensor, num_parts: int) -> None:
        """Tells the loss scale of the first step about what its weight will be, by that of its first microbatch.
        Collective over the ranks of dp and cp that compute losses."""
        largest = collectives.all_reduce(weight * num_parts, self.mesh.axis("dp+cp"), "max")
        loss_scale.expect_weight(largest.item())

    def _share_expected(self, loss_scale: LossScale) -> None:
        """Tells the ranks of the stages without a loss what was expected. Collective over all ranks."""
        own = torch.tensor(loss_scale.usual_weight or 0.0, dtype=torch.float64, device=self.log.device)
        loss_scale.expect_weight(collectives.all_reduce(own, self.mesh.world, "max").item())

    @contextmanager
    def _guarded(self, num_microbatches: int) -> Iterator[None]:
        """Finds, while the schedule runs, what a step must not do that sees a part of the model or of the batch."""
        with ExitStack() as stack:
            stack.enter_context(self.state_watch.watching(num_microbatches * self.mesh.dp.size))
            stack.enter_context(self.hook_watch.watching())
            if self.mesh.pp.size > 1:
                own = [self.user_step.module, *self.user_step.models]
                stack.enter_context(step_checks.refusing_all_parameters(own))
            yield

    def _enter(
        self,
        parts: list[StepBatch],
        seed: int,
        gradients: StepGradients,
        context: Context,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        microbatch: int,
    ) -> Tensor:
        """Enters the user's step for one stage and microbatch; the loss is scaled as it shall be differentiated."""
        part, user_step = parts[microbatch], self.user_step
        user_step.begin_microbatch(part)
        user_step.seed_random(seed, microbatch, part.group_index)
        self.log.num_copies = part.num_copies
        # A rank that holds the last stage alone leaves no step early, and need not copy the states of metrics.
        mark = self.log.mark() if self.mesh.own_stages[0] < self.mesh.sizes.num_stages - 1 else None
        num_parts = len(parts) * self.mesh.dp.size
        rows = None if self.batches.are_planned else part.rows
        # Elsewhere nothing reaches a loss.
        holds_last = self.mesh.own_stages[-1] == self.mesh.sizes.num_stages - 1
        num_recorded = int(rows) if holds_last and rows is not None else 0
        try:
            with (
                context(),
                self.row_check.recording(part.batch, num_recorded, num_parts) as record,
            ):
                # A step that changes its batch in place does so once for each stage of this rank.
                is_shared = len(self.mesh.own_stages) > 1
                batch = map_tensors(part.batch, Tensor.clone) if is_shared else part.batch
                output = user_step.module.training_step(batch, *args[1:], **kwargs)
                self._take_outputs(output)
        except StageExit:
            assert mark is not None
            self.log.rewind(mark)
            raise
        loss, is_sum = loss_of(output), loss_reduction_of(output) == "sum"
        if loss is None:
            raise no_loss("microbatch")
        weight = user_step.loss_weight(output, rows, self.log.device, num_parts=num_parts)
        by_rows = self.log.by_rows if record is not None and user_step.counts_rows(output, rows) else ()
        self.row_check.check(record, loss, output, self.log.numbers, by_rows, num_parts)
        self.log.end_microbatch(loss, weight, part.rows, is_sum=is_sum)
        # Each of these ranks has the whole loss and their gradients are summed: so each counts for its share.
        share = (torch.ones_like(weight) if is_sum else weight) / part.num_copies
        if gradients.loss_scale is None:
            return loss * share.to(loss.dtype)
        if gradients.loss_scale.usual_weight is None:
            self._expect_weight(gradients.loss_scale, weight, num_parts)
        # Not in float16, whose range a number of tokens can leave.
        return loss.float() * (share * gradients.scale_of_sums).float()

    def _take_outputs(self, output: Any) -> None:
        """Records the further numbers that a step returned; what is none is told once."""
        extras = (
            {name: value for name, value in output.items() if name not in OWN_KEYS} if isinstance(output, dict) else {}
        )
        for name, value in extras.items():
            if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
                self.log.take_output(name, value)
                if not isinstance(value, bool) and _is_integer(value) and name not in self._told:
                    self._told.add(name)
                    rank_zero_warn(
                        f"training_step returned the count {name!r} beside the loss, of which hooks get the mean over "
                        'microbatches and data-parallel ranks; return a fraction, or log it with reduce_fx="sum"',
                        category=UserWarning,
                    )
            elif name not in self._told:
                self._told.add(name)
                rank_zero_warn(
                    f"training_step returned {name!r} beside the loss, a {type(value).__name__} of one microbatch, "
                    "which no hook gets: a schedule runs the step once for each microbatch and stage, and hands "
                    "numbers on. Keep it in a torchmetrics.Metric, return a number, or use "
                    'PipelineConfig(mode="collective")',
                    category=UserWarning,
                )

    def _num_updates(self) -> dict[str, int]:
        """Number of updates of each metric of the module."""
        metrics = {name: child for name, child in self.user_step.module.named_modules() if isinstance(child, Metric)}
        return {name: metric._update_count for name, metric in metrics.items()}

    def _refuse_metrics(self, before: dict[str, int]) -> None:
        """Raises where the step updated metrics: several ranks run one microbatch, and each would count it."""
        if updated := [name for name, count in self._num_updates().items() if count != before.get(name, 0)]:
            raise RuntimeError(
                f"training_step updated the metrics {', '.join(updated)} under dynamic context parallelism, where each "
                "rank of a group would count the same microbatch, and groups differ; log numbers by self.log (a mean, "
                'or reduce_fx="sum"), or update metrics in validation'
            )


def _is_integer(value: float | Tensor) -> bool:
    return not value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, int)
