"""A script as a user writes it, for the tests that start it by a launcher; it trains until somebody ends it.

Each rank leaves a file of what it found in the first epoch.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_megatron  # noqa: F401 - makes the strategy's name known
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small


class Says(L.Callback):
    """Leaves a file of the first epoch, and one once steps of the second are taken; lets steps take a while."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 0:
            rank, loss = trainer.global_rank, float(trainer.callback_metrics["val_loss"])
            shown = {"val_loss": loss, "world": trainer.world_size, "rank": rank}
            (self.folder / f"{rank}.json").write_text(json.dumps(shown))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        time.sleep(0.02)
        if trainer.global_step == 6:
            (self.folder / f"rank {trainer.global_rank} trains").touch()


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    callbacks = [Says(folder), ModelCheckpoint(folder, "{step}", every_n_train_steps=2)]
    trainer = make_trainer(
        Layout(world=2, pp=2, microbatches=2),
        max_epochs=3000,
        callbacks=callbacks,
        enable_checkpointing=True,
    )
    trainer.fit(Small(), Data())
    (folder / "came to its end").touch()
