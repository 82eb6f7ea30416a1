"""The losses of a fit, step by step, and of one that saves and may go on from what another saved."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.trainer.layouts import Layout, make_trainer


class Losses(L.Callback):
    """The loss of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))


def resumed_losses(
    module: L.LightningModule, data: L.LightningDataModule, folder: Path, layout: Layout, ckpt_path: str | None
) -> list[float]:
    """The losses up to step 4, from the first or from a checkpoint on; every second step is saved in `folder`."""
    torch.manual_seed(7)
    losses = Losses()
    saver = ModelCheckpoint(folder / "saved", filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(
        layout,
        max_steps=4,
        max_epochs=-1,
        limit_val_batches=0,
        enable_checkpointing=True,
        callbacks=[losses, saver],
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return losses.losses
