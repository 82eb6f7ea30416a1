"""Runs the user's steps over the mesh: under a schedule, or directly on every rank.

    which            when                                              the user's step is entered
    plain            one process, one microbatch                       once, untouched
    scheduled        training with several stages or microbatches      once per microbatch on every stage
    direct           evaluation; other training; collective mode       once on every rank

Either way the loss is the mean over what the losses are means of (valid tokens, where the model says so, else rows)
of the global batch, gradients are those of that mean, and what was logged is logged once on every rank.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_megatron.any_module.loss_count import CountedMeans
from lightning_megatron.comm import collectives
from lightning_megatron.comm.p2p import Hop, LaneGroups, Mailbox
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.data_parallel_comm import DataParallelComm
from lightning_megatron.optim.loss_scale import LossScale
from lightning_megatron.pipeline.collective import CollectiveCall
from lightning_megatron.pipeline.forward_backward_overlap import ForwardBackwardOverlap
from lightning_megatron.pipeline.microbatches import of_share
from lightning_megatron.pipeline.module import Driver, PipelineModule
from lightning_megatron.pipeline.runtime import Runtime
from lightning_megatron.pipeline.scheduled import LocalCall
from lightning_megatron.pipeline.step_hooks import StepHook
from lightning_megatron.tensor import weight_gradients
from lightning_megatron.tensor.weight_gradients import WeightGradients
from lightning_megatron.trainer.config import ConfigurationError, PipelineConfig
from lightning_megatron.trainer.dynamic_context.prefetch import DynamicContext
from lightning_megatron.trainer.setup import expert_replicas
from lightning_megatron.trainer.setup.pipelined_models import pipeline_faults
from lightning_megatron.trainer.step.batch_checks import BatchChecks
from lightning_megatron.trainer.step.coupled_rows import RowCheck
from lightning_megatron.trainer.step.loader_sync import LoaderSync
from lightning_megatron.trainer.step.microbatches import Cutting
from lightning_megatron.trainer.step.operation_record import OperationRecord
from lightning_megatron.trainer.step.scheduled_step import ScheduledStep
from lightning_megatron.trainer.step.step_batches import StepBatches
from lightning_megatron.trainer.step.step_checks import HookWatch, LossCheck, StateWatch
from lightning_megatron.trainer.step.step_gradients import StepGradients
from lightning_megatron.trainer.step.step_log import StepLog
from lightning_megatron.trainer.step.user_step import (
    Context,
    UserStep,
    loss_of,
    loss_reduction_of,
    no_loss,
    reciprocal,
)
from lightning_megatron.transformer.moe import share_yield_to_peer


class Steps:
    """The steps of one fit, validate, test or predict. Every rank calls the same methods in the same order."""

    def __init__(
        self,
        *,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        pipelined: dict[str, PipelineModule],
        mesh: Mesh,
        device: torch.device,
        lanes: Mapping[Hop, LaneGroups],
        cutting: Cutting,
        pipeline: PipelineConfig,
        dp_comm: DataParallelComm | None,
        loss_scale: LossScale | None,
        log_dtype: torch.dtype,
        prefetch: DynamicContext | None = None,
        loaders: LoaderSync | None = None,
    ) -> None:
        self._module = module
        self._mesh = mesh
        self._device = device
        self._cutting = cutting
        self._user_step = user_step = UserStep(trainer, module, list(pipelined.values()), mesh, loaders)
        is_split = mesh.pp.size > 1 or not cutting.is_whole or prefetch is not None
        uses_schedule = is_split and pipeline.mode == "auto" and module.automatic_optimization
        self._is_plain = mesh.world.size == 1 and not uses_schedule
        if faults := pipeline_faults(module, mesh.sizes, uses_schedule=uses_schedule):
            raise ConfigurationError(faults)
        # Names of weights of which data-parallel ranks hold shards.
        sharded = () if dp_comm is None or dp_comm.master_weights is None else dp_comm.master_weights.sharded_names()
        # Data-parallel ranks that share experts.
        self.linked = expert_replicas.linked_dp_ranks(module, mesh)
        self._checks = BatchChecks(self.linked, needs_equal_shapes=expert_replicas.needs_equal_shapes(module))
        batches = StepBatches(
            user_step=user_step,
            mesh=mesh,
            device=device,
            cutting=cutting,
            linked=expert_replicas.calling_together(module, mesh, shards_parameters=bool(sharded)),
            checks=self._checks,
            prefetch=prefetch,
        )
        gradient_views = WeightGradients() if dp_comm is None else WeightGradients(dp_comm.grad_view)
        weight_gradients.share(module, gradient_views)
        self._gradients: StepGradients | None = None
        if dp_comm is not None:
            self._gradients = StepGradients(
                dp_comm, gradient_views, loss_scale, trainer, module, device, uses_schedule=uses_schedule
            )
        alternation, mailbox = ForwardBackwardOverlap(device), Mailbox(mesh.pp, lanes, device)
        share_yield_to_peer(module, alternation.yield_to_peer)
        self._runtime = Runtime(mesh.pp, mailbox, alternation)
        self._driver: Driver = LocalCall()
        if mesh.pp.size > 1:
            self._driver = CollectiveCall(mesh.pp, mailbox, device, batches.count_of)
        # Hooks before the first step may call the models too.
        user_step.drive(self._driver)
        self._log = StepLog(module, mesh, device, log_dtype, tail_on_last_stage=False)
        self._loss_check = LossCheck(mesh.axis("pp+cp+tp"))
        # A write to a sharded weight, which is elsewhere, fails by itself.
        self._state_watch, self._hook_watch = StateWatch(module, mesh, sharded), HookWatch(module, mesh)
        own_ranks, looked_at = self._mesh.axis("pp+cp+tp").ranks, ("training_step", "validation_step", "test_step")
        self._row_checks = {name: RowCheck(module, own_ranks, name) for name in looked_at}
        self._scheduled: ScheduledStep | None = None
        if uses_schedule:
            self._scheduled = ScheduledStep(
                user_step=user_step,
                runtime=self._runtime,
                log=StepLog(module, mesh, device, log_dtype, tail_on_last_stage=True),
                mesh=mesh,
                pipeline=pipeline,
                batches=batches,
                driver_between=self._driver,
                loss_check=self._loss_check,
                state_watch=self._state_watch,
                hook_watch=self._hook_watch,
                row_check=self._row_checks["training_step"],
            )
        # Share of this data-parallel rank in the loss of a manual step, [], and its rows.
        self._manual_share: Tensor | None = None
        self._manual_rows = 1

    @property
    def gradients(self) -> StepGradients:
        """Gradients of the step that is under way; raises RuntimeError where nothing is fitted."""
        if self._gradients is None:
            raise RuntimeError("gradients and their norms are there during trainer.fit only")
        return self._gradients

    @property
    def dp_comm(self) -> DataParallelComm:
        """Sums of gradients and gathers of weights over data-parallel ranks; there while fitting."""
        return self.gradients.dp_comm

    @property
    def uses_schedule(self) -> bool:
        """Whether training steps are run by a schedule, and not called once a batch."""
        return self._scheduled is not None

    @property
    def is_scheduled(self) -> bool:
        """Whether a schedule is running right now."""
        return self._scheduled is not None and self._scheduled.is_running

    def set_step_hook(self, step_hook: StepHook | None) -> None:
        """Sets the hook that is called around actions of schedules and sums of gradients; None: no hook."""
        self._runtime.step_hook = step_hook
        if self._gradients is not None:
            self._gradients.step_hook = step_hook

    def train(self, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Output of `training_step` for the batch `args[0]`, with the loss of the global batch."""
        self._user_step.begin_training()
        with self._user_step.counted():
            if self._scheduled is not None:
                return self._scheduled.run(self.gradients, context, args, kwargs)
            output = self._train_at_once(context, args, kwargs)
        if output is None and self._module.automatic_optimization and self._mesh.sizes.world > 1:
            raise no_loss("batch")
        return output

    def _train_at_once(self, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_batch("training_step", args)
        rows = self._user_step.begin_batch(args, self._driver)
        self.dp_comm.gather(0)
        self.gradients.graph = self.dp_comm.begin_graph()
        if self._is_plain:
            with context():
                return self._module.training_step(*args, **kwargs)
        dp_cp = self._mesh.axis("dp+cp")
        if not self._module.automatic_optimization:
            # The backwards come inside the step, before any weight of a loss is known: a rank counts by its rows.
            own = rows if self._user_step.num_copies < math.inf else 0
            self._manual_rows = rows
            share = torch.tensor(float(own), dtype=torch.float64, device=self._device)
            self._manual_share = share / collectives.all_reduce(share, dp_cp)
        self._log.num_copies, num_parts = self._user_step.num_copies, self._mesh.dp.size
        # Over several stages the model's calls are cut.
        num_calls = num_parts * (self._cutting.count_of(rows) if self._mesh.pp.size > 1 else 1)
        with (
            self._log.recording(),
            self._user_step.synced_random(),
            context(),
            self._state_watch.watching(num_calls),
            self._hook_watch.watching() if num_calls > 1 else nullcontext(),
            self._row_checks["training_step"].recording(args[:1], rows, num_parts) as record,
        ):
            output = self._module.training_step(*args, **kwargs)
        if not self._module.automatic_optimization:
            self.dp_comm.end_passes()
            self.dp_comm.end_without_step()
        loss, is_sum = loss_of(output), loss_reduction_of(output) == "sum"
        if not self._module.automatic_optimization:
            self._user_step.refuse_sums(output, num_parts)
        weight = self._user_step.loss_weight(output, rows, self._device, num_parts=num_parts)
        self._log.end_microbatch(loss, weight, rows, is_sum=is_sum)
        summary = self._log.replay(self._user_step.whereabouts)
        self._loss_check.check(loss)
        self._check_rows("training_step", record, loss, output, rows)
        if loss is None or not self._module.automatic_optimization or dp_cp.size == 1:
            return output
        part = torch.ones_like(weight) if is_sum else weight
        share = of_share(loss, part / self._user_step.num_copies * reciprocal(summary.weight))
        # The value is that of the global batch, the gradient this rank's share of it.
        global_loss = share + (summary.loss.to(loss.dtype) - share).detach()
        return {**output, "loss": global_loss} if isinstance(output, dict) else global_loss

    def backward(self, loss: Tensor, differentiate: Callable[[Tensor], None], *, reduce_now: bool) -> None:
        """Leaves the gradients of the global batch on the parameters; only this batch's parts of them where a later
        batch of the same optimizer step is still to come (`reduce_now` False)."""
        if self._scheduled is not None:
            self.gradients.end_scheduled(reduce_now=reduce_now)
        elif self._module.automatic_optimization:
            has_several_stages = self._mesh.pp.size > 1
            self.gradients.backward(loss, differentiate, reduce_now=reduce_now, has_several_stages=has_several_stages)
        else:
            if self._manual_share is not None:
                self._user_step.ask_of_manual_loss(loss, self._manual_rows, num_parts=self._mesh.dp.size)
                loss = loss * self._manual_share.to(loss.dtype)
            self.gradients.manual_backward(loss, differentiate)

    def evaluate(self, name: str, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Output of the user's validation, test or predict step, on every rank."""
        self._user_step.begin_evaluation()
        with nullcontext() if self._gradients is None else self.dp_comm.evaluating():
            return self._evaluate(name, context, args, kwargs)

    def _evaluate(self, name: str, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_batch(name, args)
        rows = self._user_step.begin_batch(args, self._driver)
        step = getattr(self._module, name)
        if self._is_plain or name == "predict_step":
            with self._user_step.synced_random(), context():
                return step(*args, **kwargs)
        self._log.num_copies = self._user_step.num_copies
        with self._user_step.counted():
            with (
                CountedMeans(),
                self._log.recording(),
                self._user_step.synced_random(),
                context(),
                self._row_checks[name].recording(args[:1], rows, self._mesh.dp.size) as record,
            ):
                output = step(*args, **kwargs)
            weight, is_sum = self._user_step.loss_weight(output, rows, self._device), loss_reduction_of(output) == "sum"
            self._log.end_microbatch(loss_of(output) if is_sum else None, weight, rows, is_sum=is_sum)
            self._log.replay(self._user_step.whereabouts)
        self._check_rows(name, record, None, output, rows)
        return output

    def _check_rows(
        self, name: str, record: OperationRecord | None, loss: Tensor | None, output: Any, rows: int
    ) -> None:
        # What is asked of a count waits for the device.
        by_rows = self._log.by_rows if record is not None and self._user_step.counts_rows(output, rows) else ()
        self._row_checks[name].check(record, loss, output, self._log.numbers, by_rows, self._mesh.dp.size)

    def _check_batch(self, name: str, args: tuple[Any, ...]) -> None:
        self._checks.check(name, args[0] if args else None, self._mesh.axis("pp+cp+tp"))
