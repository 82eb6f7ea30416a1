"""A small GPT that the tests of callbacks train on any layout, and what it logged and lost."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron.lightning_modules import GPTModule
from lightning_megatron.lightning_modules.adamw import AdamWConfig
from lightning_megatron.models import GPTConfig
from lightning_megatron.transformer.lora import LoraConfig, add_lora
from tests.trainer.layouts import Layout, make_trainer, replica_of

# Of a global batch.
ROWS, SEQUENCE = 8, 16
CONFIG = GPTConfig(
    num_layers=4, hidden_size=32, num_attention_heads=4, vocab_size=64, max_sequence_length=SEQUENCE, hidden_dropout=0.1
)
LAYOUTS = {
    "one": Layout(microbatches=2),
    "plain": Layout(is_plain=True),
    "tp2": Layout(world=2, tp=2, sp=True, microbatches=2),
    "dp2": Layout(world=2, microbatches=2),
    "pp2": Layout(world=2, pp=2, microbatches=4),
    "interleaved": Layout(world=2, pp=2, vp=2, microbatches=4),
    "zb_h1": Layout(world=2, pp=2, microbatches=4, schedule="zb_h1"),
    "direct": Layout(world=2, tp=2),
}


class Texts(L.LightningDataModule):
    """Random tokens; each dp rank takes its rows of every global batch."""

    def __init__(self, num_batches: int) -> None:
        super().__init__()
        self.num_batches = num_batches

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        rank, size = replica_of(self.trainer)
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(CONFIG.vocab_size, (self.num_batches, ROWS, SEQUENCE + 1), generator=generator)
        own = tokens[:, rank * ROWS // size : (rank + 1) * ROWS // size].flatten(0, 1)
        rows = [
            {"tokens": row[:-1], "labels": row[1:], "loss_mask": torch.ones(SEQUENCE, dtype=torch.float32)}
            for row in own
        ]
        return torch.utils.data.DataLoader(rows, batch_size=ROWS // size)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


class BesidePaths(GPTModule):
    """Trains LoRA adapters on frozen weights."""

    def __init__(self, config: GPTConfig, optimizer: AdamWConfig, lora: LoraConfig) -> None:
        super().__init__(config, optimizer)
        self.lora = lora

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            add_lora(self.model, self.lora)


class Losses(L.Callback):
    """The training loss after every batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["train_loss"]))


def train(
    layout: Layout,
    callbacks: list[L.Callback],
    folder: Path | None = None,
    num_batches: int = 4,
    config: GPTConfig = CONFIG,
    lora: LoraConfig | None = None,
    **options: Any,
) -> tuple[list[float], L.Trainer]:
    """Trains one epoch in float32; the losses, and the Trainer, whose CSV files are in `folder`."""
    L.seed_everything(7, verbose=False)
    losses = Losses()
    logger: Any = False if folder is None else CSVLogger(folder, name="", version="", flush_logs_every_n_steps=1)
    defaults: dict[str, Any] = {"precision": "32-true", "max_epochs": 1, "limit_val_batches": 0, "logger": logger}
    trainer = make_trainer(layout, callbacks=[*callbacks, losses], **(defaults | options))
    adamw = AdamWConfig(warmup_steps=1)
    trainer.fit(GPTModule(config, adamw) if lora is None else BesidePaths(config, adamw, lora), Texts(num_batches))
    return losses.seen, trainer
