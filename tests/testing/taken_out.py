"""What users write, made by functions that first take out of the package the mend that makes it right, or refuses it.

A process of a certificate calls such a function before it trains, and ends after it: nothing of it is left.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_megatron import grad_norm
from lightning_megatron.optim.data_parallel_comm import DataParallelComm
from lightning_megatron.pipeline.scheduled import ScheduledCall
from lightning_megatron.trainer import model_norms
from lightning_megatron.trainer.precision import MegatronPrecision
from lightning_megatron.trainer.run import ActiveRun
from lightning_megatron.trainer.setup import model_checks
from lightning_megatron.trainer.step import scheduled_step, step_checks, step_log, steps, user_step
from lightning_megatron.trainer.step.hook_check import HookCheck
from lightning_megatron.trainer.step.scheduled_step import ScheduledStep
from lightning_megatron.trainer.step.step_checks import LossCheck
from lightning_megatron.trainer.step.user_step import UserStep
from tests.testing import modules


class SaysSum(modules.Summed):
    """Its loss is a sum, and it says so."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "loss_reduction": "sum"}


class IgnoresSome(modules.Right):
    """Targets of class 0 do not count, which torch's loss knows."""

    def loss(self, inputs: Tensor, classes: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(inputs), classes, ignore_index=0)


class StepsByItself(modules.Right):
    """Runs the closure, and then steps, as Lightning's documentation shows."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


class LogsModelNorm(modules.Right):
    """Logs the norm of the model's gradient."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", grad_norm(self)["grad_2.0_norm_total"])


class ReadsGradients(modules.Right):
    """Reads gradients where they are, in a hook."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        squares = [p.grad.square().sum() for p in self.parameters() if p.grad is not None]
        self.log("squares", torch.stack(squares).sum() if squares else 0.0)


class ReturnsMore(modules.Right):
    """Returns a further number, which a hook reads."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "accuracy": loss.detach() * 2}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.log("accuracy", outputs["accuracy"])


class TiedOutside(modules.Right):
    """A weight of the chain once more in a layer outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8, 8)
        self.again.weight = self.net[2].weight  # type: ignore[index, assignment]
        self.lift = nn.Linear(modules.WIDTH, 8)

    def loss(self, inputs: Tensor, classes: Tensor) -> Tensor:
        return super().loss(inputs + self.again(self.lift(inputs))[:, : modules.WIDTH], classes)


class GradientByInput(modules.Right):
    """Has the size of a gradient by the input in its loss."""

    def loss(self, inputs: Tensor, classes: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        loss = super().loss(inputs, classes)
        [slope] = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + slope.square().sum()


class LogsSum(modules.Right):
    """Logs how many rows a batch has, as a sum."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rows", float(len(batch[0])), reduce_fx="sum")
        return super().training_step(batch, batch_idx)


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for a check that was taken out."""


def _replace(owner: Any, name: str, replacement: Any) -> None:
    """For the rest of the process."""
    patch.object(owner, name, replacement).start()


def sums() -> L.LightningModule:
    for owner in (user_step, scheduled_step, steps):
        _replace(owner, "loss_reduction_of", _nothing)
    return SaysSum()


def said_weights() -> L.LightningModule:
    known: Callable[..., Any] = UserStep.loss_weight

    @wraps(known)
    def of_rows(self: Any, output: Any, *given: Any, **options: Any) -> Any:
        return known(self, {"loss": output["loss"]}, *given, **options)

    _replace(UserStep, "loss_weight", of_rows)
    return modules.SaysItsWeight()


def counted_targets() -> L.LightningModule:
    _replace(user_step, "mean_count", _nothing)
    return IgnoresSome()


def steps_past_an_empty_closure() -> L.LightningModule:
    step: Callable[..., Any] = MegatronPrecision.optimizer_step

    @wraps(step)
    def only_with_a_result(self: Any, optimizer: Any, model: Any, closure: Any, **options: Any) -> Any:
        result = closure()
        return None if result is None else step(self, optimizer, model, lambda: result, **options)

    _replace(MegatronPrecision, "optimizer_step", only_with_a_result)
    return StepsByItself()


def compared_hooks() -> L.LightningModule:
    _replace(HookCheck, "end", _nothing)
    return modules.ClipsByItself()


def refused_penalties() -> L.LightningModule:
    _replace(step_checks, "refusing_all_parameters", lambda _: nullcontext())
    _replace(ScheduledCall, "_require_no_weight_in", _nothing)
    return modules.Penalty()


def compared_losses() -> L.LightningModule:
    _replace(LossCheck, "check", _nothing)
    return modules.Penalty()


def norms_of_all_ranks() -> L.LightningModule:
    # Of this room alone: others reduce, too.
    own = {**vars(model_norms.collectives), "all_reduce": lambda tensor, *_: tensor}
    _replace(model_norms, "collectives", SimpleNamespace(**own))
    return LogsModelNorm()


def shown_gradients() -> L.LightningModule:
    _replace(DataParallelComm, "show_gradients", _nothing)
    return ReadsGradients()


def checked_replicas() -> L.LightningModule:
    _replace(ActiveRun, "check_replicas", _nothing)
    return modules.Drifts()


def further_outputs() -> L.LightningModule:
    _replace(ScheduledStep, "_take_outputs", _nothing)
    return ReturnsMore()


def refused_ties() -> L.LightningModule:
    _replace(model_checks, "require_untied_outside", _nothing)
    return TiedOutside()


def refused_gradients_by_input() -> L.LightningModule:
    _replace(ScheduledCall, "_tied_to", lambda self, output, inputs: output)
    return GradientByInput()


def logged_sums() -> L.LightningModule:
    _replace(step_log._LogEntry, "reduction", "mean")
    return LogsSum()
