"""The two runs that the certificate compares: one device in plain torch, and a Trainer under a layout."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import MegatronStrategy, PipelineConfig
from lightning_megatron.checkpoint import Slot
from lightning_megatron.comm.rng import Draws
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import BertConfig, BertModel, GPTModel, LlavaConfig, LlavaModel, T5Config, T5Model
from lightning_megatron.optim.config import LossScaleConfig, OptimizerConfig
from lightning_megatron.optim.gradients import Gradients, ParamShard
from lightning_megatron.optim.muon import Muon, muon_groups
from lightning_megatron.pipeline.ragged import Ragged
from lightning_megatron.trainer.precision import MegatronPrecision
from tests.certificate.cases import (
    BAD_STEP,
    BATCH,
    CONFIGS,
    FROZEN,
    HALF_ROUNDOFF,
    NUM_STEPS,
    RATE_DECAY,
    SHUNNED,
    Layout,
    batches,
    config_of,
)
from tests.harness.device import device_type, trainer_devices
from tests.reference.bert import ReferenceBert
from tests.reference.gpt import ReferenceGPT
from tests.reference.llava import ReferenceLlava
from tests.reference.moe import RouterState
from tests.reference.muon import ReferenceMuon
from tests.reference.t5 import ReferenceT5

Model = GPTModel | BertModel | T5Model

SEED = 7
DTYPES = {"64-true": torch.float64, "32-true": torch.float32}
# SGD, because Adam hides a gradient that is wrong by a factor; momentum, so that steps depend on each other.
RATE, MOMENTUM = 0.1, 0.9
# Far above rounding: of a gradient that is zero but for rounding (a key's bias) a smaller one makes a step of any size.
ADAM_RATE, ADAM_EPSILON = 0.01, 1e-3
MUON_RATE = 0.02
# Numbers in a bucket: small, so that every layout has several and a parameter is cut by shards.
BUCKET_SIZE = 3000
# Of float16: it doubles after every step, and halves after a bad one.
LOSS_SCALE = LossScaleConfig(initial=1024.0, window=1, hysteresis=1)
# After each step, of which the second is bad Of a gradient a step takes no more than the rate divided by it: as much as
# SGD's.
SCALES = [2048.0, 1024.0, 2048.0]
HALF_EPSILON = 0.1
# What all steps make of a gradient that is the same in each: SGD's velocities, 1 and 1 + m and 1 + m + m^2, by rate.
HALF_REACH = sum(RATE * RATE_DECAY**step * sum(MOMENTUM**age for age in range(step + 1)) for step in range(NUM_STEPS))


def make_optimizer(rule: str, named: Iterable[tuple[str, Tensor]], config: Any = None) -> torch.optim.Optimizer:
    """The rule by which weights are stepped. With the configuration of a model they are whole, by its names."""
    if rule == "muon":
        return _make_muon(list(named), config)
    parameters = [parameter for _, parameter in named]
    if rule == "sgd":
        return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)
    epsilon = ADAM_EPSILON if rule == "adamw" else HALF_EPSILON
    return torch.optim.AdamW(parameters, lr=ADAM_RATE, eps=epsilon, weight_decay=0.1)


def _make_muon(named: list[tuple[str, Tensor]], config: Any) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"lr": MUON_RATE, "momentum": MOMENTUM, "betas": (0.9, 0.95)}
    if config is not None:
        return ReferenceMuon(named, config, _is_matrix, **settings, weight_decay=0.1, eps=ADAM_EPSILON)
    groups = muon_groups(named, weight_decay=0.1)  # type: ignore[arg-type]
    # In bfloat16 a layout and one device round otherwise.
    return Muon(groups, **settings, adamw_eps=ADAM_EPSILON, ns_dtype="float32")


def _is_matrix(name: str, weight: Tensor) -> bool:
    """Whether a weight is a matrix of a layer, by the names of the package's models."""
    is_of_ends = any(word in name for word in ("embedding", "head", "position", "norm", "relative_bias"))
    return weight.dim() > 1 and not is_of_ends and not name.endswith("bias")


Parts = list[tuple[tuple[int, ...], Tensor]]
"""Of a tensor of the unsplit model: offsets, and what stands there."""


@dataclass
class Step:
    """What one optimizer step amounts to. Tensors by name, whole or as parts."""

    losses: list[float] = field(default_factory=list)
    """Of its batches."""
    norm: float = 0.0
    gradients: dict[str, Any] = field(default_factory=dict)
    routing: dict[str, Tensor] = field(default_factory=dict)
    """By layer and name: what its router saw, and what it carries on."""


@dataclass
class Outcome:
    """All steps, the weights after them, and what was logged at the end."""

    steps: list[Step] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    """As the strategy clipped by."""


def reference(
    variant: str, precision: str, layout: Layout, *, decay: float = 1.0, left_out: tuple[int, ...] = ()
) -> Outcome:
    """The same steps on one device, in plain torch, by a hand-written loop.

    Rates are multiplied by `decay` after each step; the steps `left_out` are not done.
    """
    config, dtype = config_of(variant, layout.num_stages), DTYPES[precision]
    torch.set_default_dtype(dtype)
    try:
        initial = _model(variant, layout, Mesh.single())
    finally:
        torch.set_default_dtype(torch.float32)
    weights = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in initial.named_parameters()}
    trained = {name: w for name, w in weights.items() if w.requires_grad}
    routers = {
        layer: RouterState.initial(config.moe.router, SHUNNED.get(variant, ()))
        for layer in range(config.num_layers)
        if config.moe is not None and config.has_experts(layer)
    }
    optimizer = make_optimizer(layout.rule, trained.items(), config)
    outcome = Outcome()
    data = batches(variant, dtype, layout.num_batches)
    for first in range(0, len(data), layout.accumulate):
        step = Step()
        optimizer.zero_grad()
        for index in range(first, first + layout.accumulate):
            model = _reference(config, weights, routers, Draws(seed=SEED, step=index))
            loss = model.loss(**data[index])
            # Of a batch without an image nothing is learnt where the language model is frozen.
            if loss.requires_grad:
                (loss / layout.accumulate).backward()
            step.losses.append(loss.item())
        for weight in trained.values():
            if weight.grad is None:
                # Of batches without an image the tower has gradients, too: zeros, by which momentum goes on.
                weight.grad = torch.zeros_like(weight)
        step.gradients = {name: _grad(w).clone() for name, w in trained.items()}
        squares = [g.double().square().sum() for g in step.gradients.values()]
        step.norm = torch.stack(squares).sum().sqrt().item()
        if layout.clip is not None:
            nn.utils.clip_grad_norm_(list(trained.values()), layout.clip)
        if len(outcome.steps) not in left_out:
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= decay
            for layer, router in routers.items():
                step.routing |= {f"layers.{layer} {name}": value for name, value in router.end_step().items()}
        for router in routers.values():
            router.forget()
        outcome.steps.append(step)
    outcome.weights = {name: w.detach() for name, w in weights.items()}
    with torch.no_grad():
        # Validation reads the first batch, after training, without dropout.
        outcome.logged["val_loss"] = _reference(config, weights, routers).loss(**data[0]).item()
    outcome.logged["train_loss"] = outcome.steps[-1].losses[-1]
    outcome.logged["valid_tokens"] = _valid(data[-1]).item()
    return outcome


def _model(variant: str, layout: Layout, mesh: Mesh | None = None) -> Model:
    """The model of a variant, with its frozen parts; on the mesh of the strategy where none is given."""
    config = config_of(variant, layout.num_stages)
    if isinstance(config, BertConfig):
        return BertModel(config, mesh=mesh, seed=SEED)
    if isinstance(config, T5Config):
        return T5Model(config, mesh=mesh, seed=SEED)
    if not isinstance(config, LlavaConfig):
        return GPTModel(config, mesh=mesh, seed=SEED)
    model = LlavaModel(config, mesh=mesh, seed=SEED)
    model.freeze(*FROZEN.get(variant, ()))
    return model


def _reference(
    config: Any, weights: dict[str, Tensor], routers: dict[int, RouterState], draws: Draws | None = None
) -> Any:
    """The same model in plain torch."""
    if isinstance(config, BertConfig):
        return ReferenceBert(config, weights, draws)
    if isinstance(config, T5Config):
        return ReferenceT5(config, weights, draws)
    if isinstance(config, LlavaConfig):
        return ReferenceLlava(config, weights, draws)
    return ReferenceGPT(config, weights, draws, routers)


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _valid(batch: dict[str, Tensor]) -> Tensor:
    """Tokens that count; those of no document and padding count nothing, whether a layout hands them on or not."""
    is_valid = batch["labels"] != -100
    for name in ("segments", "decoder_segments"):
        if name in batch:
            is_valid &= batch[name] >= 0
    if "padding_mask" in batch:
        is_valid &= batch["padding_mask"]
    return (batch["loss_mask"] * is_valid).sum()


class Rows(Dataset[dict[str, Tensor]]):
    """The rows of all global batches, one after the other."""

    def __init__(self, data: list[dict[str, Any]], rank: int, size: int) -> None:
        share = BATCH // size
        self.rows = [
            {name: _row(values, row) for name, values in batch.items()}
            for batch in data
            for row in range(rank * share, (rank + 1) * share)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def _row(values: Any, row: int) -> Tensor:
    return values.narrow(row, 1).values if isinstance(values, Ragged) else values[row]


def _collate(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    return {
        name: Ragged.of([row[name] for row in rows]) if name == "images" else torch.stack([row[name] for row in rows])
        for name in rows[0]
    }


class Module(L.LightningModule):
    """An ordinary module: nothing in it knows of any layout."""

    def __init__(self, variant: str, layout: Layout) -> None:
        super().__init__()
        self.variant, self.layout = variant, layout
        self.model: Model | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = _model(self.variant, self.layout)
            if self.variant in SHUNNED:
                for router in self.model.routers.values():
                    router.expert_bias[list(SHUNNED[self.variant])] = -1.0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(**batch)
        self.log("train_loss", loss)
        self.log("valid_tokens", _valid(batch), reduce_fx="sum")
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert self.model is not None
        self.log("val_loss", self.model(**batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.layout.rule, self.named_parameters())


class Recorder(L.Callback):
    """Writes down what every step did on this rank."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy)
        gradients = strategy.steps.dp_comm.gradients
        step = Step(gradients=_gradients(gradients))
        step.norm = gradients.norm().item()
        self.outcome.steps.append(step)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        logged = float(trainer.callback_metrics["train_loss"])
        assert abs(logged - self.losses[-1]) < 1e-12 or trainer.precision == "32-true"
        if self.outcome.steps:
            self.outcome.steps[-1].routing = _routing(module)
        norm = trainer.strategy.gradient_norm  # type: ignore[attr-defined]
        if norm is not None:
            self.outcome.norms.append(norm.item())

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        accumulate = trainer.accumulate_grad_batches
        for index, step in enumerate(self.outcome.steps):
            step.losses = self.losses[index * accumulate : (index + 1) * accumulate]
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy)
        strategy.steps.dp_comm.gather_all()
        named = [(name.removeprefix("model."), p) for name, p in module.named_parameters()]
        self.outcome.weights = {name: _parts(Slot.full(name, p), p) for name, p in named}
        self.outcome.logged = {name: float(value) for name, value in trainer.callback_metrics.items()}


def _routing(module: L.LightningModule) -> dict[str, Tensor]:
    """What the routers of this rank did in the last step, and what they carry on."""
    model = module.model
    if not isinstance(model, GPTModel):
        return {}
    found = {}
    for layer, router in model.routers.items():
        report = model.routing_reports[layer]
        own = {f"{name} loss": loss for name, loss in report.losses.items()}
        own |= {"chosen": report.counts_E, "kept": report.accepted_E} | dict(router.named_buffers())
        found |= {f"{layer} {name}": value.to("cpu", copy=True) for name, value in own.items()}
    return found


def _gradients(gradients: Gradients) -> dict[str, Parts]:
    """What this rank's optimizer is about to step by."""
    return {
        shard.param.name.removeprefix("model."): _parts(_slot(shard), shard.tensor.grad)
        for shard in gradients.param_shards
        if shard.tensor.grad is not None
    }


def _slot(shard: ParamShard) -> Slot:
    return Slot(shard.param.name, shard.param.parameter, shard.range.start, shard.range.end)


def _parts(slot: Slot, tensor: Tensor) -> Parts:
    return [(piece.box.offsets, piece.tensor.to("cpu", copy=True)) for piece in slot.pieces(tensor)]


def under_layout(layout: Layout, cells: list[tuple[str, str]]) -> list[Outcome]:
    """What this rank saw of the same steps under a Trainer, for each (variant, precision)."""
    outcomes = []
    for variant, precision in cells:
        recorder = Recorder()
        _fit(layout, Module(variant, layout), recorder, DTYPES[precision], precision=precision)
        outcomes.append(recorder.outcome)
    return outcomes


def _fit(layout: Layout, module: Module, recorder: L.Callback, dtype: torch.dtype, **options: Any) -> None:
    """Runs all steps; the batches' masks are of `dtype`, `options` the Trainer's."""
    strategy = MegatronStrategy(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        context=layout.context,
        dynamic_context=layout.dynamic,
        sequence_parallel=layout.sp,
        num_microbatches=layout.microbatches,
        virtual_pipeline_model_parallel_size=layout.vp,
        pipeline=PipelineConfig(
            mode="collective" if layout.collective else "auto",
            schedule=layout.schedule,
            overlap_expert_exchange=layout.joint,
        ),
        optimizer=OptimizerConfig(
            kind=layout.optimizer_kind,
            overlap_grad_reduce=layout.overlap,
            overlap_param_gather=layout.overlap and layout.optimizer_kind != "replicated",
            bucket_size=BUCKET_SIZE,
            shard_size=layout.shard_size,
            cpu_offload=layout.offload,
            reshard_after_forward=layout.params != "kept",
            # The recorders gather what they read.
            gather_for_hooks=layout.params == "whole",
        ),
        recompute=layout.recompute,
        kernels=layout.kernels,
        loss_scale=LOSS_SCALE,
        timeout_seconds=60,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            **trainer_devices(layout.world),
            strategy=strategy,
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
            **options,
        )
        trainer.fit(module, Data(module.variant, dtype, layout))


class Data(L.LightningDataModule):
    """This dp rank's rows of every global batch."""

    def __init__(self, variant: str, dtype: torch.dtype, layout: Layout) -> None:
        super().__init__()
        self.data = batches(variant, dtype, layout.num_batches)
        self.size = layout.dp

    def _loader(self) -> DataLoader[dict[str, Tensor]]:
        assert self.trainer is not None
        strategy = self.trainer.strategy
        assert isinstance(strategy, MegatronStrategy)
        rows = Rows(self.data, strategy.data_parallel_rank, self.size)
        return DataLoader(rows, batch_size=BATCH // self.size, collate_fn=_collate)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader()

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader()


# ----------------------------------------------------------------------------------------------------------------------
# 16 bits


@dataclass
class HalfOutcome:
    """What a rank saw of a training in 16 bits."""

    moved: list[float] = field(default_factory=list)
    """By each step: the largest change of any weight, optimizer state or rate of this rank."""
    factors: list[float] = field(default_factory=list)
    """The loss scale after each step; 1 where there is none."""
    weights: dict[str, Parts] = field(default_factory=dict)
    """The master weights, at the end."""


class HalfModule(Module):
    """Rates fall with every step; where `is_injured`, one gradient is infinite in one step on the last rank alone, that
    of experts where there are some."""

    def __init__(self, variant: str, layout: Layout, is_injured: bool) -> None:
        super().__init__(variant, layout)
        self.is_injured = is_injured
        self.num_injuries = 0

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, RATE_DECAY)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        if self.is_injured and self.global_rank == self.trainer.world_size - 1:
            part = ".experts." if CONFIGS[self.variant].moe is not None else ".layers."
            matrices = [p for name, p in self.named_parameters() if part in name and p.dim() > 1]
            matrices[0].register_hook(self.injure)

    def injure(self, gradient: Tensor) -> Tensor:
        if self.trainer.fit_loop.batch_idx != BAD_STEP:
            return gradient
        self.num_injuries += 1
        injured = gradient.clone()
        injured.view(-1)[3] = float("inf")
        return injured


class HalfRecorder(L.Callback):
    """Writes down what every step of a training in 16 bits moved on this rank."""

    def __init__(self) -> None:
        self.outcome = HalfOutcome()
        self.before: dict[str, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.before = _state_of(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        now = _state_of(trainer)
        nothing = torch.zeros(1)
        changes = [(now[key] - self.before.get(key, nothing)).abs().max() for key in now if now[key].numel()]
        self.outcome.moved.append(torch.stack(changes).max().item())
        self.before = now
        plugin = trainer.precision_plugin
        assert isinstance(plugin, MegatronPrecision)
        self.outcome.factors.append(1.0 if plugin.loss_scale is None else plugin.loss_scale.factor)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, MegatronStrategy)
        param_shards = trainer.strategy.steps.dp_comm.gradients.param_shards
        self.outcome.weights = {o.param.name.removeprefix("model."): _parts(_slot(o), o.tensor) for o in param_shards}


def _state_of(trainer: L.Trainer) -> dict[str, Tensor]:
    """Copies of all that a step moves: parameters, buffers, what the optimizer steps and keeps, and its rate."""
    [optimizer] = trainer.optimizers
    [group] = optimizer.param_groups
    held = {"rate": torch.tensor(group["lr"])}
    assert isinstance(trainer.strategy, MegatronStrategy)
    with trainer.strategy.steps.dp_comm.whole_weights():
        held |= {name: p.detach().clone() for name, p in trainer.lightning_module.named_parameters()}
    held |= dict(trainer.lightning_module.named_buffers())
    for place, stepped in enumerate(group["params"]):
        held[f"{place}"] = stepped.detach()
        states = optimizer.state.get(stepped, {})
        held |= {f"{place}.{key}": value for key, value in states.items() if isinstance(value, Tensor)}
    return {name: tensor.to("cpu", torch.float64, copy=True) for name, tensor in held.items()}


def half_under_layout(layout: Layout, variant: str) -> dict[str, HalfOutcome]:
    """What this rank saw in float16, with one gradient infinite on the last rank, and in bfloat16, by precision."""
    outcomes = {}
    for precision in HALF_ROUNDOFF:
        is_injured = precision == "16-mixed"
        recorder, module = HalfRecorder(), HalfModule(variant, layout, is_injured)
        # By name Lightning gives no float16 to a CPU.
        plugins = [MixedPrecision(precision, device_type())]  # type: ignore[arg-type]
        _fit(layout, module, recorder, torch.float32, plugins=plugins)
        assert bool(module.num_injuries) == (is_injured and module.global_rank == layout.world - 1)
        outcomes[precision] = recorder.outcome
    return outcomes
