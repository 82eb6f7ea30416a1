"""Saves in the background, timed: how long training waits for the copy of the state to host memory."""

import shutil
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_megatron import MegatronStrategy


class TimedSaves(L.Callback):
    """Saves twice at the end of a step: first with buffers that are made for it, and then with those that are there.

    `figures` has the seconds of each that training waited for, and the bytes of a save, whose files are removed. The
    second is written while later steps run.
    """

    def __init__(self, step: int, folder: Path, device: torch.device) -> None:
        self._step, self._folder, self._device = step, folder, device
        self.figures: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step != self._step:
            return
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy)
        seconds = []
        for name in ("first", "second"):
            strategy.wait_for_checkpoint()
            if self._device.type == "cuda":
                # A copy takes its place after the step, for which the save is not to blame.
                torch.cuda.synchronize(self._device)
            began = time.perf_counter()
            trainer.save_checkpoint(self._folder / f"{name}.ckpt")
            seconds.append(time.perf_counter() - began)
        first = self._folder / "first.ckpt"
        num_bytes = sum(file.stat().st_size for file in first.rglob("*") if file.is_file())
        shutil.rmtree(first)
        self.figures = {"seconds": seconds, "bytes": num_bytes}
