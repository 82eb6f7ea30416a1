"""When training waits for a checkpoint, and what becomes of one that is being written when training ends."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn

from lightning_megatron.checkpoint import CheckpointConfig, Saver
from lightning_megatron.checkpoint.state import Pieces
from lightning_megatron.mesh import Axis

# How long a failed run may go on, so that the save in flight comes to its end.
_GRACE_SECONDS = 30.0


class Saving:
    """The saves of one strategy. The axis talks over host memory and over a process group that nobody else uses."""

    def __init__(self, world: Axis, config: CheckpointConfig) -> None:
        self._world = world
        self._config = config
        self._saver = Saver(world)

    @property
    def world(self) -> Axis:
        """The axis, when no save is in flight any more: two threads must not talk over one group."""
        self._saver.wait()
        return self._world

    def save(self, path: str, pieces: Pieces, meta: Mapping[str, Any], trainer: pl.Trainer) -> None:
        """Writes a checkpoint: behind training while that runs, else at once. Collective over the world."""
        is_running = trainer.state.fn == TrainerFn.FITTING and trainer.state.status == TrainerStatus.RUNNING
        self._saver.save(path, pieces, meta, wait=not (self._config.asynchronous and is_running))

    def remove(self, path: str) -> None:
        """Removes a checkpoint, once the one in flight is in place. First rank only."""
        self._saver.remove(path)

    def check(self) -> None:
        """Raises RuntimeError where the last save failed."""
        self._saver.check()

    def wait(self) -> None:
        """Returns when no save is in flight. Raises RuntimeError where the last one failed."""
        self._saver.wait()

    def end(self, *, is_failed: bool) -> None:
        """As `wait`, and gives the buffers back. After a failure it waits for seconds, and only warns."""
        if not is_failed:
            self._saver.close()
            return
        try:
            if not self._saver.close(_GRACE_SECONDS):
                rank_zero_warn("the run failed while a checkpoint was being written, and it is left unfinished")
        except RuntimeError as error:
            rank_zero_warn(str(error))
