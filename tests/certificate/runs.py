"""The two runs that the certificate compares: one device in plain torch, and a Trainer under a layout."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import MegatronStrategy, PipelineConfig
from lightning_megatron.checkpoint import Slot
from lightning_megatron.comm.rng import Draws
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPTModel
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.gradients import Gradients
from tests.certificate.cases import BATCH, VARIANTS, Layout, batches
from tests.reference.gpt import ReferenceGPT

SEED = 7
DTYPES = {"64-true": torch.float64, "32-true": torch.float32}
# SGD, because Adam hides a gradient that is wrong by a factor; momentum, so that steps depend on each other.
RATE, MOMENTUM = 0.1, 0.9
# Far above rounding: of a gradient that is zero but for rounding (a key's bias) a smaller one makes a step of any size.
ADAM_RATE, ADAM_EPSILON = 0.01, 1e-3
# Numbers in a bucket: small, so that every layout has several and a parameter is cut by shards.
BUCKET_SIZE = 3000


def make_optimizer(rule: str, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The rule by which weights are stepped."""
    if rule == "adamw":
        return torch.optim.AdamW(parameters, lr=ADAM_RATE, eps=ADAM_EPSILON, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


Parts = list[tuple[tuple[int, ...], Tensor]]
"""Of a tensor of the unsplit model: offsets, and what stands there."""


@dataclass
class Step:
    """What one optimizer step amounts to. Tensors by name, whole or as parts."""

    losses: list[float] = field(default_factory=list)
    # of its batches
    norm: float = 0.0
    gradients: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """All steps, the weights after them, and what was logged at the end."""

    steps: list[Step] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    # as the strategy clipped by


def reference(variant: str, precision: str, layout: Layout) -> Outcome:
    """The same steps on one device, in plain torch, by a hand-written loop."""
    config, dtype = VARIANTS[variant], DTYPES[precision]
    torch.set_default_dtype(dtype)
    try:
        initial = GPTModel(config, mesh=Mesh.single(), seed=SEED)
    finally:
        torch.set_default_dtype(torch.float32)
    weights = {name: p.detach().clone().requires_grad_() for name, p in initial.named_parameters()}
    optimizer = make_optimizer(layout.rule, list(weights.values()))
    outcome = Outcome()
    data = batches(config, dtype, layout.accumulate)
    for first in range(0, len(data), layout.accumulate):
        step = Step()
        optimizer.zero_grad()
        for index in range(first, first + layout.accumulate):
            model = ReferenceGPT(config, weights, Draws(seed=SEED, step=index))
            loss = model.loss(**data[index])
            (loss / layout.accumulate).backward()
            step.losses.append(loss.item())
        step.gradients = {name: _grad(w).clone() for name, w in weights.items()}
        squares = [g.double().square().sum() for g in step.gradients.values()]
        step.norm = torch.stack(squares).sum().sqrt().item()
        if layout.clip is not None:
            nn.utils.clip_grad_norm_(list(weights.values()), layout.clip)
        optimizer.step()
        outcome.steps.append(step)
    outcome.weights = {name: w.detach() for name, w in weights.items()}
    with torch.no_grad():
        # Validation reads the first batch, after training, without dropout.
        outcome.logged["val_loss"] = ReferenceGPT(config, weights).loss(**data[0]).item()
    outcome.logged["train_loss"] = outcome.steps[-1].losses[-1]
    outcome.logged["valid_tokens"] = _valid(data[-1]).item()
    return outcome


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _valid(batch: dict[str, Tensor]) -> Tensor:
    return (batch["loss_mask"] * (batch["labels"] != -100)).sum()


class Rows(Dataset[dict[str, Tensor]]):
    """The rows of all global batches, one after the other."""

    def __init__(self, data: list[dict[str, Tensor]], rank: int, size: int) -> None:
        share = BATCH // size
        self.rows = [
            {name: tensor[row] for name, tensor in batch.items()}
            for batch in data
            for row in range(rank * share, (rank + 1) * share)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


class Module(L.LightningModule):
    """An ordinary module: nothing in it knows of any layout."""

    def __init__(self, variant: str, rule: str) -> None:
        super().__init__()
        self.variant, self.rule = variant, rule
        self.model: GPTModel | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(VARIANTS[self.variant], seed=SEED)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(batch["tokens"], labels=batch["labels"], loss_mask=batch["loss_mask"])
        self.log("train_loss", loss)
        self.log("valid_tokens", _valid(batch), reduce_fx="sum")
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert self.model is not None
        self.log("val_loss", self.model(batch["tokens"], labels=batch["labels"], loss_mask=batch["loss_mask"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.rule, self.parameters())


class Recorder(L.Callback):
    """Writes down what every step did on this rank."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy)
        gradients = strategy.steps.exchange.gradients
        step = Step(gradients=_gradients(gradients))
        step.norm = gradients.norm().item()
        self.outcome.steps.append(step)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        logged = float(trainer.callback_metrics["train_loss"])
        assert abs(logged - self.losses[-1]) < 1e-12 or trainer.precision == "32-true"
        norm = trainer.strategy.gradient_norm  # type: ignore[attr-defined]
        if norm is not None:
            self.outcome.norms.append(norm.item())

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        accumulate = trainer.accumulate_grad_batches
        for index, step in enumerate(self.outcome.steps):
            step.losses = self.losses[index * accumulate : (index + 1) * accumulate]
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy)
        strategy.steps.exchange.gather_all()
        named = [(name.removeprefix("model."), p) for name, p in module.named_parameters()]
        self.outcome.weights = {name: _parts(Slot.whole(name, p), p) for name, p in named}
        self.outcome.logged = {name: float(value) for name, value in trainer.callback_metrics.items()}


def _gradients(gradients: Gradients) -> dict[str, Parts]:
    """What this rank's optimizer is about to step by."""
    return {
        owned.held.name.removeprefix("model."): _parts(
            Slot(owned.held.name, owned.held.parameter, owned.range.start, owned.range.end), owned.tensor.grad
        )
        for owned in gradients.owned
        if owned.tensor.grad is not None
    }


def _parts(slot: Slot, tensor: Tensor) -> Parts:
    return [(piece.box.offsets, piece.tensor.clone()) for piece in slot.pieces(tensor)]


def under_layout(layout: Layout, cells: list[tuple[str, str]]) -> list[Outcome]:
    """What this rank saw of the same steps under a Trainer, for each (variant, precision)."""
    return [_fit(layout, variant, precision) for variant, precision in cells]


def _fit(layout: Layout, variant: str, precision: str) -> Outcome:
    recorder = Recorder()
    strategy = MegatronStrategy(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=layout.sp,
        num_microbatches=layout.microbatches,
        virtual_pipeline_model_parallel_size=layout.vp,
        pipeline=PipelineConfig(mode="collective" if layout.collective else "auto", schedule=layout.schedule),
        optimizer=OptimizerConfig(
            kind="distributed" if layout.distributed else "replicated",
            overlap_grad_reduce=layout.overlap,
            overlap_param_gather=layout.overlap and layout.distributed,
            bucket_size=BUCKET_SIZE,
        ),
        recompute=layout.recompute,
        timeout_seconds=60,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            accelerator="cpu",
            devices=layout.world,
            strategy=strategy,
            precision=precision,  # type: ignore[arg-type]
            max_epochs=1,
            accumulate_grad_batches=layout.accumulate,
            gradient_clip_val=layout.clip,
            limit_val_batches=1,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            use_distributed_sampler=False,
            callbacks=[recorder],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = Data(variant, precision, layout)
        trainer.fit(Module(variant, layout.rule), data)
    return recorder.outcome


class Data(L.LightningDataModule):
    """This replica's rows of every global batch."""

    def __init__(self, variant: str, precision: str, layout: Layout) -> None:
        super().__init__()
        self.data = batches(VARIANTS[variant], DTYPES[precision], layout.accumulate)
        self.size = layout.dp

    def _loader(self) -> DataLoader[dict[str, Tensor]]:
        assert self.trainer is not None
        strategy = self.trainer.strategy
        assert isinstance(strategy, MegatronStrategy)
        return DataLoader(Rows(self.data, strategy.data_parallel_rank, self.size), batch_size=BATCH // self.size)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader()

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader()
