"""Ends of an epoch or a fit before its time, which all ranks must decide alike, or they wait for each other for ever.

Nothing is sent while nobody ends early. A rank that does waits until all others have come to the same place, or one has
passed it. Those tell by the threads that watch for failures, from Lightning's own counters: their main threads may wait
in a message that Lightning, a loader or a step sends by then.

    place       this rank                                               a rank has passed it
    stop 5      ends the epoch after 5 batches: trainer.should_stop     once it has trained on 5 and is not to stop
    skip 5      ends it after 5: on_train_batch_start returned -1       once it has begun to train on the next
    end 2       ends the fit after 2 epochs: trainer.should_stop        once it has begun the next
"""

from typing import Any, Self

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_megatron.trainer.fault_tolerance.failure_watch import FailureWatch
from lightning_megatron.trainer.resume.run_state import is_validation_due

_STOP_ON_ALL = (
    "trainer.should_stop was set on some ranks alone. Let all decide alike, by one call on every rank: "
    "trainer.should_stop = trainer.strategy.reduce_boolean_decision(stop, all=False)"
)
_SKIP_ON_ALL = (
    "on_train_batch_start returned -1 on some ranks alone. Let all decide alike, by one call on every rank: "
    "skip = trainer.strategy.reduce_boolean_decision(skip, all=False)"
)


class EarlyEnd(pl.Callback):
    """The strategy's own callback of a fit over several ranks, before its others that talk to all ranks."""

    def __init__(self, watch: FailureWatch, trainer: pl.Trainer) -> None:
        self._watch = watch
        self._trainer = trainer
        watch.has_passed = self._has_passed

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copy of the Trainer's callbacks is of the same run, which has one of it.
        return self

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning validates before it stops, where the validation is not due by itself too.
        is_fit = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if is_fit and trainer.should_stop and not self._is_validation_due():
            self._require_all("stop", self._batches.total.completed, _STOP_ON_ALL)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        batches = self._batches
        if batches.current.ready > batches.current.started:
            self._require_all("skip", batches.total.started, _SKIP_ON_ALL)
        elif trainer.should_stop and not batches.is_last_batch and not _is_reached(trainer.max_steps, self._step):
            self._require_all("stop", batches.total.completed, _STOP_ON_ALL)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        is_at_end = _is_reached(trainer.max_steps, self._step) or _is_reached(trainer.max_epochs, trainer.current_epoch)
        if trainer.should_stop and not is_at_end:
            self._require_all("end", self._epochs.total.ready, _STOP_ON_ALL)

    def _require_all(self, place: str, number: int, why: str) -> None:
        """Raises RuntimeError where a rank has passed this place. Waits for all ranks."""
        if (other := self._watch.absent_at(f"{place} {number}")) is not None:
            trainer = self._trainer
            what = "fit" if place == "end" else f"epoch {trainer.current_epoch}"
            raise RuntimeError(
                f"rank {trainer.global_rank} ends {what} early, after step {self._step}, and rank {other} goes on; "
                f"they would wait for each other for ever. {why}"
            )

    # --- looked at by the thread of the watch too -------------------------------------------------------------------

    def _has_passed(self, place: str) -> bool:
        kind, _, number = place.partition(" ")
        trainer, total = self._trainer, self._batches.total
        if kind == "end":
            return bool(self._epochs.total.ready > int(number))
        if kind == "skip":
            return bool(total.started > int(number))
        # What it is to do after a batch is clear once no hook of the batch, or of its validation, runs any more.
        is_decided = total.completed >= int(number) and not trainer.validating
        return bool(kind == "stop" and is_decided and not trainer.should_stop)

    def _is_validation_due(self) -> bool:
        trainer = self._trainer
        is_last = trainer.is_last_batch
        return is_validation_due(trainer, trainer.fit_loop.batch_idx + 1, is_at_end=is_last)

    @property
    def _step(self) -> int:
        return self._trainer.global_step

    @property
    def _batches(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.batch_progress

    @property
    def _epochs(self) -> Any:
        return self._trainer.fit_loop.epoch_progress


def _is_reached(limit: int | None, number: int) -> bool:
    return limit is not None and -1 < limit <= number
