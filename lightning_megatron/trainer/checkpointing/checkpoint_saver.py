"""Asynchronous saves: when training waits for one, and how one in flight ends when training ends."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn

from lightning_megatron.checkpoint import CheckpointConfig, Saver
from lightning_megatron.checkpoint.state import Pieces
from lightning_megatron.mesh import Axis

# How long a failed run may go on, so that the save in flight comes to its end.
GRACE_SECONDS = 30.0


class CheckpointSaver(Saver):
    """Saves the checkpoints of one strategy.

    Both axes are the world and talk over host memory: `world` from the main thread, `background` over a process group
    that nobody else uses.
    """

    def __init__(self, world: Axis, background: Axis, config: CheckpointConfig) -> None:
        super().__init__(world, background)
        self.world = world
        self._config = config
        self._is_urgent = False

    def save_state(self, path: str, pieces: Pieces, meta: Mapping[str, Any], trainer: pl.Trainer | None) -> None:
        """Writes a checkpoint: asynchronously while training runs, else at once. Collective over the world."""
        is_asynchronous = (
            self._config.asynchronous
            and not self._is_urgent
            and trainer is not None
            and trainer.state.fn == TrainerFn.FITTING
            and trainer.state.status == TrainerStatus.RUNNING
            and not _is_looked_for(trainer)
        )
        self.save(path, pieces, meta, wait=not is_asynchronous)

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """Makes every save inside the block synchronous; one in flight lands first, well or not."""
        try:
            self.wait()
        except RuntimeError as error:
            # The next save matters more than raising the error of this one.
            rank_zero_warn(str(error))
        self._is_urgent = True
        try:
            yield
        finally:
            self._is_urgent = False

    def end(self, *, is_failed: bool) -> None:
        """Waits for the save in flight and frees the buffers; after a failure it waits for seconds, and only warns."""
        if not is_failed:
            self.close()
            return
        try:
            if not self.close(GRACE_SECONDS):
                rank_zero_warn("the run failed while a checkpoint was being written, and it is left unfinished")
        except RuntimeError as error:
            rank_zero_warn(str(error))


def _is_looked_for(trainer: pl.Trainer) -> bool:
    """Whether a callback takes a checkpoint to be in place once `save_checkpoint` returns.

    A link to one that is not there yet would lead nowhere if the run died now. And where a name may come twice,
    Lightning numbers it by what is there: two saves would get one name, and the first would be lost.
    """
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    names = [(callback.dirpath, callback.filename) for callback in callbacks if callback.save_top_k != 0]
    lasts = [(callback.dirpath, callback.CHECKPOINT_NAME_LAST) for callback in callbacks if callback.save_last]
    return (
        any(callback.save_last == "link" or _may_repeat_a_name(callback, trainer) for callback in callbacks)
        or len(set(names)) < len(names)
        or len(set(lasts)) < len(lasts)
    )


def _may_repeat_a_name(callback: ModelCheckpoint, trainer: pl.Trainer) -> bool:
    """Whether two checkpoints that the callback keeps may have one name by its template."""
    # A single kept checkpoint is overwritten, and so is the newest where none is the best.
    if callback.save_top_k in (0, 1) or callback.monitor is None or callback.filename is None:
        return False
    fields = re.findall(r"\{(\w+)[:}]", callback.filename)
    return "step" not in fields and not ("epoch" in fields and _saves_once_an_epoch(callback, trainer))


def _saves_once_an_epoch(callback: ModelCheckpoint, trainer: pl.Trainer) -> bool:
    if not callback.every_n_epochs:
        return False
    # None: by the clock.
    every = trainer.val_check_batch
    return not trainer.enable_validation or (every is not None and every >= trainer.num_training_batches)
