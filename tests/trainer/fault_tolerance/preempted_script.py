"""A script that trains until somebody ends it, for the tests that send it a signal."""

import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small


class Says(L.Callback):
    """Leaves a file once steps are taken, and lets them take a while."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        time.sleep(0.02)
        if trainer.global_step == 3:
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
        limit_val_batches=0,
    )
    trainer.fit(Small(), Data())
    (folder / "came to its end").touch()
