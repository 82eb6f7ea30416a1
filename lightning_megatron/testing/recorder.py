"""Writes down what each step of a run did, through hooks and attributes that any user has.

Nothing here knows of a layout but `grad_norm` and the slice that a parameter's `Shard` names: the gradients are those
that hooks see on the parameters.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten
from torchmetrics import Metric

from lightning_megatron.checkpoint import Piece, Slot
from lightning_megatron.sharding import Box, shard_of
from lightning_megatron.testing.quantities import (
    BATCH,
    BUFFERS,
    CALLBACK,
    CLIPPED,
    GRADIENT,
    INITIAL,
    LOGGED,
    LOSS,
    NORM,
    VALIDATION,
    WEIGHTS,
)
from lightning_megatron.trainer.checkpointing.contents import MasterSlots
from lightning_megatron.trainer.strategy import MegatronStrategy

Parts = list[tuple[str, Tensor, Box]]
"""Tensors with their names, each with the part of the unsplit tensor that it is; a name may have several."""


class Sink(Protocol):
    """Where a recorder's findings go."""

    def numbers(self, quantity: str, step: int, values: Mapping[str, float]) -> None:
        """Takes the numbers of one step."""
        ...

    def tensors(self, quantity: str, step: int, parts: Parts) -> None:
        """Takes the tensors of one step."""
        ...


class SinkLogger(Logger):
    """A logger that gives numbers to a sink."""

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self._sink = sink
        self.quantity = LOGGED

    @property
    def name(self) -> str:
        return "certify"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        numbers = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        self._sink.numbers(self.quantity, (step or 0) + 1, numbers)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is kept of these."""


class Recorder(pl.Callback):
    """Gives all that a run does to a sink, beside its logger. `begin` is called once the module is complete and on its
    device."""

    def __init__(self, sink: Sink, logger: SinkLogger, begin: Callable[[pl.Trainer, pl.LightningModule], None]) -> None:
        self._sink = sink
        self._logger = logger
        self._begin = begin
        self._num_stepped = 0
        # Optimizer steps of the batch at hand.
        self._num_in_batch = 0
        self._step = 0
        self.dropouts: list[str] = []
        """Names of the dropouts that were turned off."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.dropouts = turn_off_dropout(pl_module)
        if str(trainer.precision) == "64-true":
            # A metric keeps the dtype in which it was made, whatever becomes of the module.
            for metric in (child for child in pl_module.modules() if isinstance(child, Metric)):
                metric.set_dtype(torch.float64)
        self._sink.tensors(INITIAL, 0, weights_of(trainer, pl_module) + buffers_of(pl_module))
        self._begin(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        leaves = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]
        parts = [(f"tensor {i}", leaf.detach().clone(), whole(leaf)) for i, leaf in enumerate(leaves)]
        self._end_step(pl_module)
        self._step, self._num_in_batch = batch_idx + 1, 0
        self._sink.tensors(BATCH, self._step, parts)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._num_in_batch += 1
        which = f" (optimizer step {self._num_in_batch} of the batch)" if self._num_in_batch > 1 else ""
        # What other optimizers step may have gradients of before, or none.
        stepped = _names_of(optimizer, trainer, pl_module)
        found = gradients_of(pl_module)
        # Those of master weights are on the parameters only where hooks of a user's read them.
        shown = {name for name, *_ in found}
        found += [part for part in stepped_gradients_of(trainer, pl_module) if part[0] not in shown]
        gradients = [(name + which, gradient, box) for name, gradient, box in found if name in stepped]
        self._sink.tensors(GRADIENT, self._step, gradients)
        self._sink.numbers(NORM, self._step, {"norm" + which: grad_norm(trainer, pl_module)})

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = self._step
        if isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
            loss = float(outputs["loss"]) * trainer.accumulate_grad_batches
            self._sink.numbers(LOSS, step, {"loss": loss})
        if trainer.global_step > self._num_stepped:
            self._num_stepped = trainer.global_step
            self._sink.tensors(CLIPPED, step, stepped_gradients_of(trainer, pl_module))
        self._sink.numbers(CALLBACK, step, _metrics(trainer))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._logger.quantity = VALIDATION

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._logger.quantity = LOGGED

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        at_end = {f"{name} (epoch)": value for name, value in _metrics(trainer).items()}
        self._sink.numbers(CALLBACK, self._step, at_end)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_step(pl_module)

    def _end_step(self, module: pl.LightningModule) -> None:
        """Looks at what the last step left, once all hooks behind it have run."""
        if self._step:
            self._sink.tensors(BUFFERS, self._step, buffers_of(module))
            self._sink.tensors(WEIGHTS, self._step, weights_of(module.trainer, module))


def _metrics(trainer: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() == 1


def whole(tensor: Tensor) -> Box:
    """All of a tensor."""
    return Box((0,) * tensor.dim(), tuple(tensor.shape))


def _own_parts(name: str, tensor: Tensor, holder: Tensor) -> Parts:
    """Copies of the parts of a tensor that is shaped as `holder`, without padding, with their places in the unsplit
    one."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return [(name, piece.tensor.clone(), piece.box) for piece in Piece.all_like(holder, dense)]


def weights_of(trainer: pl.Trainer, module: nn.Module) -> Parts:
    """A copy of what this rank holds of each parameter."""
    slots = MasterSlots()
    if isinstance(trainer.strategy, MegatronStrategy):
        slots = MasterSlots.of(trainer.strategy.steps.dp_comm)
    named = [(name, p) for name, p in module.named_parameters() if not is_lazy(p) and name not in slots.sharded]
    parts = [part for name, p in named for part in _own_parts(name, p, p)]
    shards = [(tensor.detach(), slot) for tensor, slot in slots.slots.items() if slot.name in slots.sharded]
    return parts + [(slot.name, one.tensor.clone(), one.box) for tensor, slot in shards for one in slot.pieces(tensor)]


def gradients_of(module: nn.Module) -> Parts:
    """A copy of what this rank holds of each parameter's gradient, where there is one."""
    named = module.named_parameters()
    return [part for name, p in named if p.grad is not None for part in _own_parts(name, p.grad, p)]


def stepped_gradients_of(trainer: pl.Trainer, module: nn.Module) -> Parts:
    """A copy of the gradients that optimizers of this rank step by, which are those of master weights where it has
    some."""
    if not isinstance(trainer.strategy, MegatronStrategy):
        return gradients_of(module)
    shards = trainer.strategy.steps.dp_comm.gradients.param_shards
    known = {shard.param.name for shard in shards}
    # Of groups that were added later a rank steps the parameters themselves.
    parts = [part for part in gradients_of(module) if part[0] not in known]
    for shard in shards:
        if shard.tensor.grad is None:
            continue
        dense = shard.tensor.grad.to_dense() if shard.tensor.grad.is_sparse else shard.tensor.grad
        slot = Slot(shard.param.name, shard.param.parameter, shard.range.start, shard.range.end)
        parts += [(slot.name, piece.tensor.clone(), piece.box) for piece in slot.pieces(dense)]
    return parts


def _names_of(optimizer: Any, trainer: pl.Trainer, module: nn.Module) -> set[str]:
    """Names of the parameters that an optimizer steps, itself or by their master weights."""
    stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
    names = {name for name, one in module.named_parameters() if id(one) in stepped}
    if isinstance(trainer.strategy, MegatronStrategy):
        shards = trainer.strategy.steps.dp_comm.gradients.param_shards
        names |= {shard.param.name for shard in shards if id(shard.tensor) in stepped}
    return names


def buffers_of(module: nn.Module) -> Parts:
    """A copy of each buffer."""
    return [(name, b.detach().clone(), whole(b)) for name, b in module.named_buffers() if not is_lazy(b)]


def grad_norm(trainer: pl.Trainer, module: nn.Module) -> float:
    """The norm of the whole model's gradient. Collective under a MegatronStrategy."""
    if isinstance(trainer.strategy, MegatronStrategy):
        return float(trainer.strategy.steps.dp_comm.gradients.norm())
    squares = [part.double().square().sum() for _, part, _ in gradients_of(module)]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def turn_off_dropout(module: nn.Module) -> list[str]:
    """Sets torch's own dropouts to drop nothing, and returns their names.

    Those of the package draw the same masks on every layout.
    """
    found = [(name, part) for name, part in module.named_modules() if isinstance(part, _DropoutNd) and part.p > 0]
    for _, part in found:
        part.p = 0.0
    return [name for name, _ in found]


def load_parts(full: Mapping[str, Tensor], trainer: pl.Trainer, module: nn.Module) -> None:
    """Gives the module this rank's parts of whole tensors."""
    strategy = trainer.strategy
    writable = strategy.steps.dp_comm.whole_weights if isinstance(strategy, MegatronStrategy) else nullcontext
    with torch.no_grad(), writable():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in full and not is_lazy(tensor):
                shard = shard_of(tensor)
                shard.valid(tensor).copy_(shard.part_of(full[name]))
