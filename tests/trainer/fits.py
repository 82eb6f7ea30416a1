"""One fit of a small module under a layout, and all that it left: what the trainer's tests compare."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_megatron import named_gradients
from lightning_megatron.sharding import shard_of
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data


@dataclass
class Trace:
    """What a fit did on one rank."""

    losses: list[float] = field(default_factory=list)
    """Of every batch, as training_step's caller gets it."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """Every metric after every batch."""
    epochs: list[dict[str, float]] = field(default_factory=list)
    """And after every epoch."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Of the full model, before every optimizer step."""
    rates: list[float] = field(default_factory=list)
    weights: "Parts" = field(default_factory=dict)


class Recorder(L.Callback):
    """Writes a Trace."""

    def __init__(self) -> None:
        self.trace = Trace()

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        self.trace.gradients.append({name: grad for name, grad in named_gradients(module) if grad is not None})
        self.trace.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        if isinstance(outputs, dict) and "loss" in outputs:
            self.trace.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        self.trace.steps.append(numbers(trainer))

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.trace.epochs.append(numbers(trainer))

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.trace.weights = weights(module)


def numbers(trainer: L.Trainer) -> dict[str, float]:
    """Every metric there is."""
    return {name: float(value) for name, value in (trainer.callback_metrics | trainer.progress_bar_metrics).items()}


Parts = dict[str, tuple[tuple[int, ...], Tensor]]
"""By name, where in the unsplit tensor a part begins, and the part."""


def weights(module: L.LightningModule) -> Parts:
    """A copy of what this rank holds of the module, padding left out."""
    parts = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        shard = shard_of(tensor)
        parts[name] = (shard.box.offsets, shard.valid(tensor.detach()).clone())
    return parts


def parts_apart(ours: Parts, full: Parts) -> float:
    """The largest difference between parts and the same places of whole tensors."""
    found = 0.0
    for name, (offsets, part) in ours.items():
        places = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
        wanted = full[name][1][places]
        assert torch.isfinite(part).all() or not part.is_floating_point()
        found = max(found, float((part.double() - wanted.double()).abs().max()) if part.numel() else 0.0)
    return found


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how."""

    module: Callable[[], L.LightningModule]
    trainer: dict[str, Any] = field(default_factory=dict)
    num_rows: int = 27
    """3 batches of 8 and one of 3: the last is smaller than 4 microbatches, and cut unevenly into 2."""
    is_one_call: bool = True
    """Of the model in a step."""
    is_automatic: bool = True
    """Optimization, and not the module's own."""

    def run(self, layout: Layout) -> Trace:
        recorder = Recorder()
        trainer = make_trainer(layout, callbacks=[recorder], **self.trainer)
        trainer.fit(self.module(), Data(self.num_rows))
        return recorder.trace


def difference(trace: Trace, wanted: Trace) -> float:
    """The largest difference of anything in two traces; what only one of them has is an infinite one."""
    found = [_apart(dict(enumerate(trace.losses)), dict(enumerate(wanted.losses)))]
    found.append(_apart(dict(enumerate(trace.rates)), dict(enumerate(wanted.rates))))
    for ours, theirs in ((trace.steps, wanted.steps), (trace.epochs, wanted.epochs)):
        if len(ours) != len(theirs):
            return float("inf")
        found += [_apart(a, b) for a, b in zip(ours, theirs, strict=True)]
    if len(trace.gradients) != len(wanted.gradients):
        return float("inf")
    found += [_apart(ours, theirs) for ours, theirs in zip(trace.gradients, wanted.gradients, strict=True)]
    found.append(parts_apart(trace.weights, wanted.weights))
    return max(found)


def _apart(ours: dict[Any, Any], theirs: dict[Any, Any]) -> float:
    if ours.keys() != theirs.keys():
        return float("inf")
    pairs = [(ours[name], theirs[name]) for name in ours]
    return max((float(abs(a - b).max()) if isinstance(a, Tensor) else abs(a - b) for a, b in pairs), default=0.0)
