"""A rank that ends an epoch or a fit early, alone, ends the run with the cause; where all do, all is well."""

import time
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping

from lightning_megatron.trainer.fault_tolerance import failure_watch
from tests.harness.ranks import RankFailed, run_on_ranks
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small

DP2, TP2, PP2 = Layout(world=2), Layout(world=2, tp=2), Layout(world=2, pp=2, microbatches=2)


class Ends(Small):
    """Ends something at its second batch, or after its first epoch, on some ranks."""

    def __init__(self, what: str, ranks: list[int]) -> None:
        super().__init__()
        self.what, self.ranks = what, ranks

    def _is_asked(self, what: str) -> bool:
        return self.what == what and self.global_rank in self.ranks

    def _stop(self) -> None:
        # The other rank waits for longer than two looks of the watches take.
        time.sleep(2.5 * failure_watch._POLL_SECONDS * (self.global_rank == 1))
        self.trainer.should_stop = True

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self._is_asked("skip") and batch_idx == 1 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._is_asked("stop") and batch_idx == 1:
            self._stop()

    def on_train_epoch_end(self) -> None:
        if self._is_asked("end"):
            self._stop()


def ended(layout: Layout, what: str, ranks: list[int], options: dict[str, Any]) -> tuple[int, int]:
    failure_watch._GRACE_SECONDS = 1.0  # type: ignore[attr-defined]
    callbacks = [EarlyStopping("val_loss", patience=0, min_delta=1e9)] if what == "monitor" else []
    trainer = make_trainer(layout, max_epochs=3, callbacks=callbacks, **options)
    trainer.fit(Ends(what, ranks), Data(24))
    return trainer.current_epoch, trainer.global_step


@pytest.mark.parametrize(
    ("layout", "what", "rank", "options", "told"),
    [
        (DP2, "stop", 0, {}, "ends epoch 0 early, after step 2,"),
        (TP2, "stop", 1, {"limit_val_batches": 0}, "ends epoch 0 early, after step 2,"),
        (PP2, "skip", 0, {}, "ends epoch 0 early, after step 1,"),
        (DP2, "end", 1, {}, "ends fit early, after step 3,"),
    ],
)
def test_a_rank_that_ends_early_alone_ends_the_run_with_the_cause(
    layout: Layout, what: str, rank: int, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(RankFailed) as failure:
        run_on_ranks(2, ended, layout, what, [rank], options, init=False)
    assert f"RuntimeError: rank {rank} {told} and rank {1 - rank} goes on" in str(failure.value)
    assert "reduce_boolean_decision(" in str(failure.value)


@pytest.mark.parametrize(
    ("what", "options", "ends"),
    [
        ("stop", {}, (1, 2)),
        ("stop", {"limit_val_batches": 0, "max_steps": 2}, (1, 2)),
        ("skip", {}, (3, 3)),
        ("end", {"limit_val_batches": 0}, (1, 3)),
        ("monitor", {"val_check_interval": 1}, (2, 6)),
    ],
)
def test_an_early_end_of_all_ranks_is_as_on_one_device(
    what: str, options: dict[str, Any], ends: tuple[int, int]
) -> None:
    assert run_on_ranks(1, ended, Layout(is_plain=True), what, [0], options, init=False) == [ends]
    assert run_on_ranks(2, ended, DP2, what, [0, 1], options, init=False) == [ends] * 2
