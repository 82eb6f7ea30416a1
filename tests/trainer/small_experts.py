"""A small GPT of experts as ordinary modules, its data, and fits of it: what tests of the end of a step compare."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.moe.config import AuxLoss, MoEConfig, RouterConfig
from lightning_megatron.moe.load import RoutingReport
from tests.trainer.layouts import Layout, make_trainer, replica_of

NUM_EXPERTS, NUM_LAYERS, VOCABULARY, SEQUENCE = 4, 4, 37, 8
BIAS_RATE = 0.25
ROUTER = RouterConfig(
    num_experts=NUM_EXPERTS,
    top_k=2,
    aux_losses=(AuxLoss(coefficient=0.3), AuxLoss(scope="global", coefficient=0.2)),
    z_loss=0.1,
    bias_update_rate=BIAS_RATE,
)
# The first two layers are dense: with two stages of two layers one has no expert at all.
CONFIG = GPTConfig(
    num_layers=NUM_LAYERS,
    hidden_size=16,
    num_attention_heads=4,
    ffn_hidden_size=24,
    vocab_size=VOCABULARY,
    max_sequence_length=SEQUENCE,
    init_std=0.3,
    moe=MoEConfig(router=ROUTER, layers=(2, 3), capacity=ExpertCapacity(factor=1.0)),
)


def rows(num_rows: int) -> TensorDataset:
    """Tokens and a mask [rows, sequence]; rows of the mask are uneven."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (num_rows, SEQUENCE), generator=generator)
    mask = (torch.rand(num_rows, SEQUENCE, generator=generator) > 0.3).float()
    return TensorDataset(tokens, mask)


class Rows(L.LightningDataModule):
    """Rows in order, in global batches of `batch`, of which each dp rank takes its part."""

    def __init__(self, num_rows: int = 16, batch: int = 4) -> None:
        super().__init__()
        self.num_rows, self.batch = num_rows, batch

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        rank, size = replica_of(self.trainer)
        own = self.batch // size
        indices = [i for i in range(self.num_rows) if i % self.batch // own == rank]
        return DataLoader(Subset(rows(self.num_rows), indices), batch_size=own)

    val_dataloader = train_dataloader


class Language(L.LightningModule):
    """An ordinary module around the model."""

    def __init__(self, config: GPTConfig = CONFIG, lr: float = 0.05) -> None:
        super().__init__()
        self.config, self.lr = config, lr
        self.model: GPTModel | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(self.config, seed=5)

    def loss(self, batch: Any, model: GPTModel | None = None) -> Tensor:
        tokens, mask = batch
        asked = model if model is not None else self.model
        assert asked is not None
        loss: Tensor = asked(tokens, labels=tokens.roll(-1, 1), loss_mask=mask)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


@dataclass
class Seen:
    """What a fit did, step by step, on one rank."""

    biases: list[dict[str, Tensor]] = field(default_factory=list)
    """After every batch, by layer."""
    shares: list[dict[str, Tensor]] = field(default_factory=list)
    """What routers took from the step before, for the loss over the global batch."""
    reports: list[dict[str, RoutingReport]] = field(default_factory=list)
    """Of all layers, after every batch."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    validations: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


class Watcher(L.Callback):
    """Writes `Seen`."""

    def __init__(self) -> None:
        self.seen = Seen()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        model = model_of(module)
        self.seen.biases.append({name: router.expert_bias.clone() for name, router in model.routers.items()})
        self.seen.shares.append(
            {name: router.global_tokens_per_expert.clone() for name, router in model.routers.items()}
        )
        self.seen.reports.append(model.all_routing_reports())
        self.seen.metrics.append({name: float(v) for name, v in trainer.callback_metrics.items()})
        if outputs is not None and "loss" in outputs:
            self.seen.losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.seen.validations.append(float(trainer.callback_metrics["val_loss"]))

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.seen.weights = {name: value.detach().clone() for name, value in module.state_dict().items()}


def model_of(module: L.LightningModule) -> GPTModel:
    """The module's model, or its student."""
    [model] = [child for name, child in module.named_modules() if isinstance(child, GPTModel) and name != "teacher"]
    return model


def fit(
    layout: Layout,
    make: Callable[[], L.LightningModule] = Language,
    *,
    num_rows: int = 16,
    batch: int = 4,
    ckpt_path: Any = None,
    callbacks: tuple[L.Callback, ...] = (),
    **options: Any,
) -> Seen:
    """One epoch; `options` are the Trainer's."""
    watcher = Watcher()
    trainer = make_trainer(layout, callbacks=[*callbacks, watcher], **({"max_epochs": 1} | options))
    trainer.fit(make(), Rows(num_rows, batch), ckpt_path=ckpt_path)
    return watcher.seen
