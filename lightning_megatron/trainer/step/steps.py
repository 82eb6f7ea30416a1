"""Runs the user's steps over the mesh: under a schedule, or directly on every rank.

    which            when                                              the user's step is entered
    plain            one process, one microbatch                       once, untouched
    scheduled        training with several stages or microbatches      once per microbatch on every stage
    direct           evaluation; other training; collective mode       once on every rank

Either way the loss is the mean over what the losses are means of (valid tokens, where the model says so, else rows)
of the global batch, gradients are those of that mean, and what was logged is logged once on every rank.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_megatron.comm import collectives
from lightning_megatron.comm.p2p import Hop, LaneGroups, Mailbox
from lightning_megatron.mesh import Mesh
from lightning_megatron.metrics.step_timeline import REDUCE
from lightning_megatron.optim.data_parallel_comm import DataParallelComm
from lightning_megatron.optim.loss_scale import LossScale
from lightning_megatron.optim.reductions import scale_in_place
from lightning_megatron.pipeline.collective import CollectiveCall
from lightning_megatron.pipeline.forward_backward_overlap import ForwardBackwardOverlap
from lightning_megatron.pipeline.module import Driver, PipelineModule
from lightning_megatron.pipeline.plans import training_plan
from lightning_megatron.pipeline.runtime import Runtime
from lightning_megatron.pipeline.scheduled import LocalCall, ScheduledCall, StageExit
from lightning_megatron.pipeline.step_hooks import StepHook, hooked
from lightning_megatron.tensor import weight_gradients
from lightning_megatron.tensor.weight_gradients import WeightGradients
from lightning_megatron.trainer.config import ConfigurationError, PipelineConfig
from lightning_megatron.trainer.dynamic_context.prefetch import DynamicContext
from lightning_megatron.trainer.setup import setup_model
from lightning_megatron.trainer.step.microbatches import Cutting, StepBatch, as_planned, cut_evenly, rows_of
from lightning_megatron.trainer.step.rng_sync import aligned_random, require_equal_batches
from lightning_megatron.trainer.step.step_log import StepLog
from lightning_megatron.trainer.step.uneven_inputs import require_equal_shapes
from lightning_megatron.transformer.moe import share_yield_to_peer

# Batches of each kind of loop whose contents are compared over the ranks of a replica.
_CHECKED_BATCHES = 2

Context = Callable[[], AbstractContextManager[Any]]


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
        dynamic: DynamicContext | None = None,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._models = list(pipelined.values())
        self._mesh = mesh
        self._device = device
        self._cutting = cutting
        self._pipeline = pipeline
        self._dp_comm = dp_comm
        self._loss_scale = loss_scale
        # Plans every training step, where there is one.
        self._dynamic = dynamic
        # Replicas that make each model call together.
        self.linked = setup_model.linked_replicas(module, mesh)
        self._needs_equal_shapes = self.linked.size > 1 and setup_model.takes_sizes_for_known(module)
        is_split = mesh.pp.size > 1 or not cutting.is_whole or dynamic is not None
        self._uses_schedule = is_split and pipeline.mode == "auto" and module.automatic_optimization
        self._is_plain = mesh.world.size == 1 and not self._uses_schedule
        if mesh.pp.size > 1:
            _require_one_model(pipelined, module, mesh.pp.size, self._uses_schedule)
        self._weight_gradients = WeightGradients() if dp_comm is None else WeightGradients(dp_comm.grad_view)
        weight_gradients.share(module, self._weight_gradients)
        mailbox = Mailbox(mesh.pp, lanes, device)
        overlap = ForwardBackwardOverlap(device)
        share_yield_to_peer(module, overlap.yield_to_peer)
        self._runtime = Runtime(mesh.pp, mailbox, overlap)
        self._step_hook: StepHook | None = None
        self._direct_driver: Driver = LocalCall()
        if mesh.pp.size > 1:
            self._direct_driver = CollectiveCall(
                mesh.pp, mailbox, device, lambda rows: self._agreed(max(1, min(cutting.count_of(rows), rows)))
            )
        self._log = StepLog(module, mesh, device, log_dtype, tail_on_last_stage=self._uses_schedule)
        self._direct_log = StepLog(module, mesh, device, log_dtype, tail_on_last_stage=False)
        self._frees_gradients = not _are_gradients_kept(trainer, module)
        # Gradients of the last schedule, until Lightning asks for them by `backward`.
        self._pending: dict[nn.Parameter, Tensor] = {}
        # By which their sums over the replicas are to be multiplied, [].
        self._factor: Tensor | None = None
        # Gradients of earlier optimizer steps that nobody zeroed, aside while later ones are summed over ranks.
        self._summed: dict[nn.Parameter, Tensor] = {}
        # Whether the gradients on the parameters are those of global batches.
        self._are_summed = False
        self._manual_share: Tensor | None = None
        self._num_checked: dict[str, int] = {}
        # Batches of validation, test and prediction since the last of training; the loops' own counters stand still.
        self._num_evaluated = 0
        # Whether a schedule is running right now.
        self.is_scheduled = False

    @property
    def dp_comm(self) -> DataParallelComm:
        """What sums gradients and brings weights; there while fitting."""
        assert self._dp_comm is not None
        return self._dp_comm

    def set_step_hook(self, step_hook: StepHook | None) -> None:
        """Has a step hook hear of the actions of schedules and of the sums of gradients; none: nobody does."""
        self._step_hook = self._runtime.step_hook = step_hook

    # --- training ---------------------------------------------------------------------------------------------------

    def train(self, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `training_step` returns for the batch `args[0]`, its loss that of the global batch."""
        if self._dynamic is None:
            self._check_batch("training_step", args[0] if args else None)
        # What is drawn must not depend on how much was evaluated before: a resumed run does not do that again.
        self._num_evaluated = 0
        for model in self._models:
            model.draws.step = self._trainer.fit_loop.epoch_loop.total_batch_idx
        if self._uses_schedule:
            return self._train_scheduled(context, args, kwargs)
        return self._train_direct(context, args, kwargs)

    def _train_scheduled(self, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        gradients = self.dp_comm.gradients
        parts = self._parts_of(args[0])

        def enter_step(microbatch: int) -> Tensor:
            part = parts[microbatch]
            self._forget_weights()
            self._name(part)
            # A rank that holds the last stage alone leaves no step early, and need not copy the states of metrics.
            mark = self._log.mark() if self._mesh.own_stages[0] < self._mesh.sizes.num_stages - 1 else None
            try:
                with self._aligned(microbatch, part.place), context():
                    output = self._module.training_step(part.batch, *args[1:], **kwargs)
            except StageExit:
                assert mark is not None
                self._log.rewind(mark)
                raise
            loss = _loss_of(output)
            if loss is None:
                raise RuntimeError(
                    "training_step returned no loss for a microbatch; a schedule cannot skip one, and with several "
                    "processes Lightning skips no batch either; return a loss of zero that depends on the model"
                )
            weight = self._weight_of(output, part.rows)
            self._log.end_microbatch(loss, weight, part.rows)
            # Each of these ranks has the whole loss and their gradients are summed: so each counts for its share.
            share = weight / part.num_copies
            if self._loss_scale is None:
                return loss * share.to(loss.dtype)
            # Not in float16, whose range a number of tokens can leave.
            return loss.float() * (share * self._scale).float()

        def differentiate(loss: Tensor) -> None:
            self._trainer.strategy.precision_plugin.backward(loss, self._module, None)

        num_batches = self._trainer.accumulate_grad_batches
        # Where Lightning is about to zero them anyway, they are freed before the schedule needs the memory.
        are_freed = self._frees_gradients and self._trainer.fit_loop.batch_idx % num_batches == 0
        gradients.free(dropped=are_freed)
        aside = gradients.take(copied=not are_freed)
        if are_freed:
            aside = {}
        if num_batches == 1:
            self.dp_comm.begin_backwards()
        opened = self._weight_gradients.opened
        sizes = self._mesh.sizes
        schedule = self._pipeline.schedule_of(pp=sizes.pp, vp=sizes.vp, microbatches=len(parts))
        first_samples = [part.first_sample for part in parts]
        call = ScheduledCall(self._models, self._mesh, enter_step, differentiate, first_samples, opened, self.dp_comm)
        num_updates = self._num_updates()
        self._drive(call)
        self.is_scheduled = True
        try:
            with self._log.recording():
                self._runtime.run(training_plan(schedule), call)
        finally:
            self.is_scheduled = False
            self._drive(self._direct_driver)
            self._name(None)
        if self._dynamic is not None:
            self._refuse_metrics(num_updates)
        summary = self._log.replay()
        self._pending = gradients.take()
        gradients.add(aside)
        # Lightning divides the loss by the number of batches of a step after this returns: too late for a schedule.
        self._factor = _reciprocal(summary.weight) / (num_batches * self._scale)
        if self._loss_scale is not None:
            self._loss_scale.learn_weight(summary.weight)
        if num_batches > 1:
            # Each batch has a weight of its own; of a single one the sums are scaled, of which a rank has fewer.
            scale_in_place(list(self._pending.values()), self._factor)
            self._factor = None
        return {"loss": summary.loss.to(self._log.dtype)}

    def _parts_of(self, batch: Any) -> list[StepBatch]:
        """The microbatches of a step for this rank, on its device."""
        if self._dynamic is None:
            parts = cut_evenly(batch, self._cutting.count_of(rows_of(batch)), self._mesh)
            # A last batch of few rows has fewer, and may have them on one replica alone.
            count = self._agreed(len(parts))
            return parts if count == len(parts) else cut_evenly(batch, count, self._mesh)
        planned = self._dynamic.take(self._trainer.fit_loop.batch_idx, batch)
        parts = as_planned(planned.microbatches, planned.num_rows, self._mesh)
        self._check_batch("training_step", [(part.batch, part.documents) for part in parts])
        return [replace(part, batch=self._handed_over(part.batch)) for part in parts]

    def _agreed(self, num_microbatches: int) -> int:
        """The number of microbatches that all replicas can have which make their model calls together."""
        if self.linked.size == 1 or self._cutting.is_whole:
            return num_microbatches
        own = torch.tensor(num_microbatches, device=self._device)
        return int(collectives.all_reduce(own, self.linked, "min").item())

    def _handed_over(self, batch: Any) -> Any:
        """A batch of a plan as Lightning hands over that of a loader: converted, through the hooks, on the device."""
        batch = self._trainer.precision_plugin.convert_input(batch)
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self._trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def _name(self, part: StepBatch | None) -> None:
        """Tells models and log which microbatch comes next; none: whatever comes is cut as the mesh says."""
        for model in self._models:
            model.context_group = None if part is None else part.context_group
            model.draws.documents = None if part is None else part.documents
        self._log.num_copies = self._mesh.cp.size if part is None else part.num_copies

    def _num_updates(self) -> dict[str, int]:
        """How often each metric of the module was updated."""
        metrics = {name: child for name, child in self._module.named_modules() if isinstance(child, Metric)}
        return {name: metric._update_count for name, metric in metrics.items()}

    def _refuse_metrics(self, before: dict[str, int]) -> None:
        """Raises where the step updated metrics: several ranks run one microbatch, and each would count it."""
        if updated := [name for name, count in self._num_updates().items() if count != before.get(name, 0)]:
            raise RuntimeError(
                f"training_step updated the metrics {', '.join(updated)} under dynamic context parallelism, where each "
                "rank of a group would count the same microbatch, and groups differ; log numbers by self.log (a mean, "
                'or reduce_fx="sum"), or update metrics in validation'
            )

    @property
    def _scale(self) -> float:
        """By which the losses of a schedule, which are sums, are multiplied beside their weights."""
        return 1.0 if self._loss_scale is None else self._loss_scale.of_sums

    def _train_direct(self, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = self._begin_direct(args)
        self.dp_comm.gather(0)
        if self._is_plain:
            with context():
                return self._module.training_step(*args, **kwargs)
        replicas = self._mesh.axis("dp+cp")
        if not self._module.automatic_optimization:
            # The backwards come inside the step, before any weight of a loss is known: a replica counts by its rows.
            share = torch.tensor(float(rows), dtype=torch.float64, device=self._device)
            self._manual_share = share / collectives.all_reduce(share, replicas)
        with self._direct_log.recording(), self._aligned(0), context():
            output = self._module.training_step(*args, **kwargs)
        loss = _loss_of(output)
        weight = self._weight_of(output, rows)
        self._direct_log.end_microbatch(loss, weight, rows)
        summary = self._direct_log.replay()
        if loss is None or not self._module.automatic_optimization or replicas.size == 1:
            return output
        share = loss * (weight / self._mesh.cp.size * _reciprocal(summary.weight)).to(loss.dtype)
        # The value is that of the global batch, the gradient this replica's share of it.
        whole = share + (summary.loss.to(loss.dtype) - share).detach()
        return {**output, "loss": whole} if isinstance(output, dict) else whole

    def backward(self, loss: Tensor, differentiate: Callable[[Tensor], None], *, reduce_now: bool) -> None:
        """Leaves the gradients of the global batch on the parameters; only this batch's parts of them where a later
        batch of the same optimizer step is still to come (`reduce_now` False)."""
        gradients = self.dp_comm.gradients
        gradients.free(dropped=False)
        if self._uses_schedule:
            self._set_summed_aside()
            gradients.add(self._pending)
            self._pending = {}
        elif not self._module.automatic_optimization:
            # Each manual backward reduces its own gradients; what was there before is reduced already.
            before = gradients.take(copied=True)
            share = loss if self._manual_share is None else loss * self._manual_share.to(loss.dtype)
            self._differentiate(share, differentiate)
            with hooked(self._step_hook, REDUCE):
                gradients.reduce(outside_over_stages=False, factor=self._factor)
            gradients.add(before)
            return
        else:
            self._set_summed_aside()
            # Several stages run a backward for each microbatch within this one.
            if reduce_now and self._mesh.pp.size == 1:
                self.dp_comm.begin_backwards()
                self.dp_comm.expect(0)
            self._differentiate(loss, differentiate)
            self.dp_comm.complete(0)
        if reduce_now:
            with hooked(self._step_hook, REDUCE):
                gradients.reduce(outside_over_stages=self._uses_schedule, factor=self._factor)
            gradients.add(self._summed)
            self._summed, self._are_summed = {}, True

    def _set_summed_aside(self) -> None:
        """Keeps gradients of earlier optimizer steps that nobody zeroed from being summed again."""
        if self._are_summed:
            self._summed, self._are_summed = self.dp_comm.gradients.take(copied=True), False

    def _differentiate(self, loss: Tensor, differentiate: Callable[[Tensor], None]) -> None:
        """Runs the backward of a direct step."""
        if self._loss_scale is not None:
            loss = loss.float() * self._loss_scale.factor
            self._factor = torch.tensor(1.0 / self._loss_scale.factor, dtype=torch.float64, device=self._device)
        with self._weight_gradients.opened():
            differentiate(loss)

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, name: str, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the user's validation, test or predict step returns, on every rank."""
        self._num_evaluated += 1
        if self._dp_comm is not None:
            self._dp_comm.gather_all()
        self._check_batch(name, args[0] if args else None)
        rows = self._begin_direct(args)
        step = getattr(self._module, name)
        if self._is_plain or name == "predict_step":
            with self._aligned(0), context():
                return step(*args, **kwargs)
        with self._direct_log.recording(), self._aligned(0), context():
            output = step(*args, **kwargs)
        self._direct_log.end_microbatch(None, self._weight_of(output, rows), rows)
        self._direct_log.replay()
        return output

    # --- what both need ---------------------------------------------------------------------------------------------

    def _drive(self, driver: Driver) -> None:
        for model in self._models:
            model.driver = driver

    def _forget_weights(self) -> None:
        for model in self._models:
            model.loss_weight = None

    def _begin_direct(self, args: tuple[Any, ...]) -> int:
        """Makes the models ready for a direct step; returns the rows of its batch, 1 where it has none."""
        rows = rows_of(args[0]) if args else 1
        for model in self._models:
            model.draws.first_sample, model.draws.call = self._mesh.dp.rank * rows, 0
        self._drive(self._direct_driver)
        self._forget_weights()
        return rows

    def _weight_of(self, output: Any, rows: float) -> Tensor:
        """What the step's loss is a mean over, [], float64: as the step says, as the model says, else its rows."""
        if isinstance(output, dict) and output.get("loss_weight") is not None:
            return torch.as_tensor(output["loss_weight"], device=self._device).detach().double().reshape(())
        told = [model.loss_weight for model in self._models if model.loss_weight is not None]
        if len(told) > 1:
            raise ValueError(
                f"{len(told)} models computed losses in one step, each a mean over its own tokens; say what the step's "
                'loss is a mean over: return {"loss": loss, "loss_weight": number of tokens or samples}'
            )
        if not told and self.is_scheduled and self._dynamic is not None:
            raise ValueError(
                "dynamic context parallelism packs documents of any rows, so a mean over rows means nothing; say what "
                'the loss is a mean over: return {"loss": loss, "loss_weight": number of tokens}, or call the model '
                "with labels"
            )
        weight = told[0].detach() if told else torch.tensor(rows, device=self._device)
        return weight.double().reshape(())

    def _aligned(self, microbatch: int, place: int | None = None) -> AbstractContextManager[None]:
        """Random numbers of the user's code that agree on all ranks that run a microbatch together, and differ between
        those that do not: by `place`, which is that of the replica unless it is told."""
        # Tensor-parallel ranks of one replica run the same code on the same data: their generators stay together, and
        # draw what one device would.
        if self._mesh.axis("dp+cp").size == 1 and self._mesh.pp.size == 1 and not self.is_scheduled:
            return nullcontext()
        step = self._trainer.fit_loop.epoch_loop.total_batch_idx
        state, batch = self._trainer.state, self._trainer.fit_loop.batch_idx
        # A validation of its own is not the one at the end of the fit before it.
        stage = str(state.stage) if state.fn == TrainerFn.FITTING else f"{state.fn} alone"
        replica = self._mesh.dp.rank if place is None else place
        call = (stage, step, batch, self._num_evaluated, replica, microbatch)
        return aligned_random(torch.initial_seed(), *call)

    def _check_batch(self, name: str, batch: Any) -> None:
        if self._needs_equal_shapes:
            require_equal_shapes(batch, self.linked)
        # The cp ranks of a replica run different microbatches of a plan; whether they read the same is found before it.
        is_planned = name == "training_step" and self._dynamic is not None
        replica = self._mesh.axis("pp+tp" if is_planned else "pp+cp+tp")
        checked = self._num_checked.get(name, 0)
        if replica.size == 1 or checked >= _CHECKED_BATCHES or batch is None:
            return
        self._num_checked[name] = checked + 1
        require_equal_batches(batch, replica)


def _require_one_model(pipelined: dict[str, PipelineModule], module: nn.Module, stages: int, scheduled: bool) -> None:
    if not pipelined:
        raise ConfigurationError(
            [
                f"{type(module).__name__} cannot be pipelined over {stages} stages: it holds no PipelineModule (such "
                f"as GPTModel) and not exactly one nn.Sequential of at least {stages} children among its attributes; "
                "build its model in configure_model from one of these, or use pipeline_model_parallel_size=1"
            ]
        )
    if len(pipelined) > 1 and scheduled:
        raise ConfigurationError(
            [
                f"{type(module).__name__} holds {len(pipelined)} pipelined models ({', '.join(pipelined)}); a schedule "
                'runs one; use PipelineConfig(mode="collective")'
            ]
        )


def _are_gradients_kept(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Whether somebody looks at the gradients of the last optimizer step before they are zeroed, or does not zero them.

    Without that a schedule frees them before it needs the memory.
    """
    kind = type(module)
    return (
        kind.optimizer_zero_grad is not pl.LightningModule.optimizer_zero_grad
        or kind.on_before_zero_grad is not pl.LightningModule.on_before_zero_grad
        or any(type(c).on_before_zero_grad is not pl.Callback.on_before_zero_grad for c in trainer.callbacks)  # type: ignore[attr-defined]
    )


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, Tensor) else None


def _reciprocal(weight: Tensor) -> Tensor:
    """1/weight, and 0 for a weight of 0: nothing was valid, and every gradient is zero."""
    return torch.where(weight > 0, 1.0 / weight, torch.zeros_like(weight))
