"""The gradients of a step, from the backward to the sum over data-parallel ranks.

Note: gradients come before zero_grad. Lightning calls `training_step`, then `zero_grad`, then `backward`; a schedule
has run its backwards by the time `training_step` returns. Its gradients are taken aside there, and `backward` puts them
on the parameters.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_megatron.metrics.step_timeline import REDUCE
from lightning_megatron.optim.data_parallel_comm import DataParallelComm
from lightning_megatron.optim.loss_scale import LossScale
from lightning_megatron.optim.reductions import scale_in_place
from lightning_megatron.pipeline.step_hooks import StepHook, hooked
from lightning_megatron.tensor.weight_gradients import WeightGradients
from lightning_megatron.trainer.step.user_step import reciprocal

Differentiate = Callable[[Tensor], None]


class StepGradients:
    """Gradients of the optimizer step that is under way, of which each batch adds some."""

    def __init__(
        self,
        dp_comm: DataParallelComm,
        weight_gradients: WeightGradients,
        loss_scale: LossScale | None,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        device: torch.device,
        *,
        uses_schedule: bool,
    ) -> None:
        self.dp_comm = dp_comm
        self.weight_gradients = weight_gradients
        self.loss_scale = loss_scale
        self.step_hook: StepHook | None = None
        self.graph: Any = None
        """What the forward of the batch ran, where no schedule runs it."""
        self._device = device
        self._frees = not _are_gradients_in_use(trainer, module)
        self._trainer = trainer
        # Gradients of the last schedule, until Lightning asks for them by `backward`.
        self._pending: dict[nn.Parameter, Tensor] = {}
        # Factor of their sums over data-parallel ranks, [].
        self._factor: Tensor | None = None
        # Gradients of earlier optimizer steps that nobody zeroed, aside while later ones are summed over ranks.
        self._summed: dict[nn.Parameter, Tensor] = {}
        # Whether the gradients on the parameters are those of global batches.
        self._are_summed = False
        is_shared = not module.automatic_optimization and dp_comm.gradients.mesh.axis("dp+cp").size > 1
        if uses_schedule or is_shared or dp_comm.master_weights is not None:
            dp_comm.gradients.reducer.require_own_backward = self._require_own_backward

    @property
    def scale_of_sums(self) -> float:
        """Factor of a schedule's losses, which are sums, in addition to their weights."""
        return 1.0 if self.loss_scale is None else self.loss_scale.of_sums

    @contextmanager
    def scheduled(self) -> Iterator[None]:
        """Collects the gradients of a schedule that runs inside the block as pending, and puts earlier ones back."""
        gradients, num_batches = self.dp_comm.gradients, self._trainer.accumulate_grad_batches
        # Where Lightning is about to zero them anyway, they are freed before the schedule needs the memory.
        are_freed = self._frees and self._trainer.fit_loop.batch_idx % num_batches == 0
        self.dp_comm.free_gradients(dropped=are_freed)
        aside = gradients.take(copied=not are_freed)
        if are_freed:
            aside = {}
        if num_batches == 1:
            self.dp_comm.begin_backwards()
        self.dp_comm.begin_training()
        yield
        self.dp_comm.end_passes()
        self._pending = gradients.take()
        gradients.add(aside)

    def weigh_scheduled(self, weight: Tensor) -> None:
        """Divides the schedule's gradients by the weight of the global batch, [], now or with the sum over dp."""
        num_batches = self._trainer.accumulate_grad_batches
        # Lightning divides the loss by the number of batches of a step after this returns: too late for a schedule.
        self._factor = reciprocal(weight) / (num_batches * self.scale_of_sums)
        if self.loss_scale is not None:
            self.loss_scale.learn_weight(weight)
        if num_batches > 1:
            # Each batch has a weight of its own; of a single one the sums are scaled, of which a rank has fewer.
            scale_in_place(list(self._pending.values()), self._factor)
            self._factor = None

    def end_scheduled(self, *, reduce_now: bool) -> None:
        """Puts the schedule's gradients on the parameters and, with `reduce_now`, sums them over dp."""
        self.dp_comm.free_gradients(dropped=False)
        self._set_summed_aside()
        self.dp_comm.gradients.add(self._pending)
        self._pending = {}
        if reduce_now:
            self._reduce(outside_over_stages=True)

    def backward(
        self, loss: Tensor, differentiate: Differentiate, *, reduce_now: bool, has_several_stages: bool
    ) -> None:
        """Runs the backward of a batch and, with `reduce_now`, sums the gradients over dp."""
        self.dp_comm.free_gradients(dropped=False)
        self._set_summed_aside()
        # Several stages run a backward for each microbatch within this one.
        if reduce_now and not has_several_stages:
            self.dp_comm.begin_backwards()
            self.dp_comm.expect(0)
        self._differentiate(loss, differentiate)
        self.dp_comm.end_graph(self.graph)
        if self.dp_comm.expects_each:
            self.dp_comm.end_backward()
        self.dp_comm.complete(0)
        self.dp_comm.end_passes()
        if reduce_now:
            self._reduce(outside_over_stages=False)

    def manual_backward(self, loss: Tensor, differentiate: Differentiate) -> None:
        """Runs a backward of manual optimization, and sums its own gradients: those before it are summed already."""
        gradients = self.dp_comm.gradients
        self.dp_comm.free_gradients(dropped=False)
        before = gradients.take(copied=True)
        self._differentiate(loss, differentiate)
        # The same step may run further backwards through what it ran.
        self.dp_comm.end_graph(None)
        with hooked(self.step_hook, REDUCE):
            gradients.reduce(outside_over_stages=False, factor=self._factor)
        gradients.add(before)

    def _reduce(self, *, outside_over_stages: bool) -> None:
        gradients = self.dp_comm.gradients
        with hooked(self.step_hook, REDUCE):
            gradients.reduce(outside_over_stages=outside_over_stages, factor=self._factor)
        gradients.add(self._summed)
        self._summed, self._are_summed = {}, True

    def _set_summed_aside(self) -> None:
        """Sets aside gradients of earlier optimizer steps that nobody zeroed, as they are summed already."""
        if self._are_summed:
            self._summed, self._are_summed = self.dp_comm.gradients.take(copied=True), False

    def _require_own_backward(self, name: str) -> None:
        """Raises RuntimeError where training_step or a hook ran the backward that made a gradient of the parameter.

        It is summed over no ranks, and what zeroes gradients of master weights, or between microbatches, leaves it.
        """
        if self._trainer.training and not self.weight_gradients.is_open:
            raise RuntimeError(
                "training_step ran a backward by itself, or a hook, as loss.backward() does, which made a gradient of "
                f"{name}: it would not be summed over ranks, or would be added to that of the loss. Use "
                "self.manual_backward(loss) under manual optimization, and torch.autograd.grad(loss, inputs) for "
                "gradients of inputs"
            )

    def _differentiate(self, loss: Tensor, differentiate: Differentiate) -> None:
        if self.loss_scale is not None:
            loss = loss.float() * self.loss_scale.factor
            # Filled on the device: for a copy of a number the host would wait.
            self._factor = torch.full((), 1.0 / self.loss_scale.factor, dtype=torch.float64, device=self._device)
        with self.weight_gradients.opened():
            differentiate(loss)


def _are_gradients_in_use(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Whether user code may read the gradients of the last step before they are zeroed, or does not zero them.

    Without that a schedule frees them before it needs the memory.
    """
    kind = type(module)
    return (
        kind.optimizer_zero_grad is not pl.LightningModule.optimizer_zero_grad
        or kind.on_before_zero_grad is not pl.LightningModule.on_before_zero_grad
        or any(type(c).on_before_zero_grad is not pl.Callback.on_before_zero_grad for c in trainer.callbacks)  # type: ignore[attr-defined]
    )
