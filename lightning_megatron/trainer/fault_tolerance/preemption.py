"""Signals that end a run: all ranks stop after the same batch, save, and exit together with code 0.

Lightning's own handlers talk to the other ranks, or save, from inside the handler, wherever in a step the rank is; with
ranks that wait for each other that can last for ever. Here a handler leaves a note, and the note is acted on between
steps, by all ranks at once: where Lightning's ModelCheckpoint saves too, so that a resumed run is the run without a
break. Those stop points are the ends of

    a training batch        unless the window of accumulated gradients is open, or a validation or the epoch's end
                            is due: a run that resumed there would leave that out
    a validation            not its batches: a callback may have put other weights in for them
    a training epoch

A run that does not train has nothing to save: it stops after any batch. A run that comes to its end before all ranks
have heard of the signal has saved what it wanted to; it leaves there.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, Self, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_megatron.checkpoint import CheckpointConfig
from lightning_megatron.comm.collectives import merge_objects
from lightning_megatron.trainer.checkpointing.checkpoint_saver import CheckpointSaver
from lightning_megatron.trainer.checkpointing.local_checkpoint import LocalCheckpoint
from lightning_megatron.trainer.fault_tolerance.stop_vote import StopVote
from lightning_megatron.trainer.resume.run_state import is_validation_due

T = TypeVar("T")

_FAILED_SAVE = "a checkpoint could not be written"


class Preemption(Checkpoint):
    """The strategy's own callback, last of all during a run; Lightning calls checkpoint callbacks after the others."""

    def __init__(
        self, config: CheckpointConfig, vote: StopVote, saver: CheckpointSaver, environment: ClusterEnvironment | None
    ) -> None:
        """Remembers the user's signal handlers, and so is made before Lightning registers its own."""
        # All ranks leave at the same stop point.
        self.is_leaving = False
        self._vote = vote
        self._saver = saver
        self._requeue = _requeue_signal(environment)
        self._signals = {signal.Signals[name] for name in config.save_on_signals} | self._requeue
        self._of_user = {number: signal.getsignal(number) for number in self._signals}
        self._before: dict[signal.Signals, Any] = {}
        self._stop_point = 0
        self._first_step = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copy of the Trainer's callbacks is of the same run, which has one of it.
        return self

    # --- signals ----------------------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Replaces Lightning's handlers, which are registered once a run is about to begin, by its own."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._signals:
            if number in self._requeue and callable(self._of_user[number]):
                # Lightning leaves it to the user, and so do we.
                continue
            if signal.getsignal(number) != self._note:
                self._before[number] = signal.signal(number, self._note)

    def give_back(self) -> None:
        """Puts back what was there; Lightning then puts back what was there before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._vote.ask(signal.Signals(number).name)
        handler = self._of_user[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    # --- stop points ------------------------------------------------------------------------------------------------

    @override
    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first_step = trainer.global_step
        self._pass(trainer)

    on_train_start = on_sanity_check_end

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        num_batches = batch_idx + 1
        is_open = pl_module.automatic_optimization and num_batches % trainer.accumulate_grad_batches != 0
        if not (is_open or trainer.is_last_batch or is_validation_due(trainer, num_batches, is_at_end=False)):
            self._pass(trainer)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            self._end(trainer)
        elif not trainer.sanity_checking:
            self._pass(trainer)

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            self._pass(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pass(trainer)

    @override
    def on_test_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._pass(trainer)

    @override
    def on_predict_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._pass(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer)

    on_test_end = on_predict_end = on_train_end

    def _pass(self, trainer: pl.Trainer) -> None:
        """Goes on, or stops with all ranks. Waits for none while none of them asks."""
        if self._saver.has_failed:
            self._vote.ask(_FAILED_SAVE)
        self._stop_point += 1
        reason = self._vote.reason_to_stop(self._stop_point)
        if reason is None:
            return
        own = {self._stop_point}
        if len(points := merge_objects(own, self._saver.world, _union)) > 1:
            raise RuntimeError(
                f"the ranks were to stop together ({reason}), and are after {sorted(points)} batches and "
                "validations; give all data-parallel ranks the same number of batches"
            )
        if reason == _FAILED_SAVE:
            self.is_leaving = True
            self._saver.wait()
            # It did not raise: the failure has been reported meanwhile.
            self.is_leaving = False
        elif signal.Signals[reason] in self._requeue:
            self._requeue_job(signal.Signals[reason])
        else:
            self._leave(trainer, reason)
        self._vote.go_on(self._stop_point, reason)

    def _end(self, trainer: pl.Trainer) -> None:
        """Leaves if any rank has been asked to; else the script goes on after the run."""
        reasons = merge_objects(set(self._vote.reasons), self._saver.world, _union)
        if names := sorted(reasons & {number.name for number in self._signals - self._requeue}):
            self._exit(trainer, names[0], "it had come to its end")

    # --- ends -------------------------------------------------------------------------------------------------------

    def _requeue_job(self, number: signal.Signals) -> None:
        """Lightning's own handler: saves where its SLURM support looks, and asks for the job to be queued again."""
        handler: Callable[[int, FrameType | None], Any] = self._before[number]
        with self._saver.urgent():
            handler(number, None)

    def _leave(self, trainer: pl.Trainer, reason: str) -> None:
        path = _path(trainer) if trainer.state.fn == TrainerFn.FITTING else None
        what = "there was nothing to save"
        if path is not None and trainer.global_step > self._first_step:
            with self._saver.urgent():
                trainer.save_checkpoint(path)
            what = f"saved {path}"
        self._exit(trainer, reason, what)

    def _exit(self, trainer: pl.Trainer, reason: str, what: str) -> NoReturn:
        self.is_leaving = True
        # What is in flight would be given seconds only, as after a failure.
        self._saver.wait()
        rank_zero_info(f"The run ends after step {trainer.global_step} because of {reason}: {what}")
        if reason == signal.SIGTERM.name:
            # What `trainer.received_sigterm` answers.
            trainer._signal_connector.received_sigterm = True
        raise SIGTERMException


def _requeue_signal(environment: ClusterEnvironment | None) -> set[signal.Signals]:
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
        return {environment.requeue_signal}
    return set()


def _union(sets: list[set[T]]) -> set[T]:
    return set().union(*sets)


def _path(trainer: pl.Trainer) -> str | None:
    """Path that `ckpt_path="last"` looks at; None where the user wants no checkpoints."""
    others = [one for one in trainer.checkpoint_callbacks if not isinstance(one, (Preemption, LocalCheckpoint))]
    for callback in others:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath:
            metrics = {
                **trainer.callback_metrics,
                "epoch": torch.tensor(trainer.current_epoch),
                "step": torch.tensor(trainer.global_step),
            }
            return callback.format_checkpoint_name(metrics, callback.CHECKPOINT_NAME_LAST)
    last = f"{ModelCheckpoint.CHECKPOINT_NAME_LAST}{ModelCheckpoint.FILE_EXTENSION}"
    return os.path.join(trainer.default_root_dir, last) if others else None
