"""A callback that leaves a checkpoint where a run is shorter than the steps between those of its ModelCheckpoint."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class FinalCheckpoint(L.Callback):
    """Saves at the end of training what its ModelCheckpoint would have saved, in a run that has saved nothing.

    One that saves nothing by `save_top_k=0` stays without.
    """

    def __init__(self) -> None:
        self._has_saved = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._has_saved = False

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._has_saved = True

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Later, when the loops are over, their state would say that the whole epoch was trained on.
        if self._has_saved or not _is_over(trainer):
            return
        metrics = trainer.callback_metrics | {
            "epoch": torch.tensor(trainer.current_epoch),
            "step": torch.tensor(trainer.global_step),
        }
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.save_top_k and not _saves_now(callback, trainer):
                path = callback.format_checkpoint_name(metrics)
                trainer.save_checkpoint(path, callback.save_weights_only)
                callback.last_model_path = path


def _saves_now(callback: ModelCheckpoint, trainer: L.Trainer) -> bool:
    """Whether a callback that goes by epochs saves at the end of this one, and not after a validation."""
    every = callback.every_n_epochs or 0
    return every > 0 and (trainer.current_epoch + 1) % every == 0 and callback._should_save_on_train_epoch_end(trainer)


def _is_over(trainer: L.Trainer) -> bool:
    """Whether training ends with this epoch."""
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return False
    is_last_step = 0 <= trainer.max_steps <= trainer.global_step
    is_last_epoch = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch + 1
    return trainer.should_stop or is_last_step or is_last_epoch
