"""One rank's failure ends every rank, soon, and every rank shows what failed first."""

import time
from pathlib import Path
from typing import Any, Self

import pytest
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import nn

from lightning_megatron.checkpoint import is_checkpoint
from lightning_megatron.trainer.fault_tolerance import failure_watch as watch
from tests.harness import ranks
from tests.harness.ranks import RankFailed, run_on_ranks
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small

# The watch gives a rank 5 s to fail by itself before it ends it; the time-outs of everything else are longer than this.
SOON_SECONDS = 40.0
# Where a rank has to be ended, which nothing else than the watch does, it is given less.
SHORT_GRACE_SECONDS = 1.0

PP2 = Layout(world=2, pp=2, microbatches=2)
DP2 = Layout(world=2)
EVERY_RANK = -1
# What Lightning says of a fresh Trainer with a checkpoint callback that has no best path yet.
NO_PATHS = "ignore:.*(was called without a model|there is no last checkpoint available):UserWarning"


class Fails(Small):
    """Raises on one rank at one point, in the second batch."""

    def __init__(self, rank: int, point: str) -> None:
        super().__init__()
        self.rank, self.point = rank, point
        if point == "model":
            assert isinstance(self.net, nn.Sequential)
            # On stage 0, which is on the last rank.
            self.net[1] = Breaks()

    def break_at(self, point: str) -> None:
        if self.point == point and self.rank in (self.trainer.global_rank, EVERY_RANK):
            raise KeyError(f"broken in {point}")

    def configure_model(self) -> None:
        super().configure_model()
        self.break_at("configure_model")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.break_at("training_step")
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.break_at("the tail of the step")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.break_at("validation_step")
        super().validation_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.break_at("a hook")

    def cpu(self) -> Self:
        # The strategy's teardown calls it.
        self.break_at("cpu")
        return super().cpu()


class Breaks(nn.Tanh):
    num_calls = 0

    def forward(self, hidden: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == 4:
            raise KeyError("broken in model")
        return super().forward(hidden)


def fail(layout: Layout, rank: int, point: str) -> None:
    make_trainer(layout, max_epochs=1).fit(Fails(rank, point), Data())


def fail_and_linger(layout: Layout, point: str) -> None:
    """The failing process does not end: its connections stay open, and nobody would hear of it by them."""
    watch._GRACE_SECONDS = SHORT_GRACE_SECONDS  # type: ignore[attr-defined]
    try:
        fail(layout, 1, point)
    except KeyError:
        time.sleep(SOON_SECONDS - 5)
        raise


def fail_and_save(folder: Path, rank: int) -> None:
    # On a busy machine one may come later than the other.
    watch._GRACE_SECONDS = 60.0 if rank == EVERY_RANK else SHORT_GRACE_SECONDS  # type: ignore[attr-defined]
    callbacks = [OnExceptionCheckpoint(folder)]
    make_trainer(DP2, callbacks=callbacks, enable_checkpointing=True).fit(Fails(rank, "a hook"), Data())


@pytest.mark.filterwarnings(NO_PATHS)
def test_a_rank_that_fails_alone_does_not_wait_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", SOON_SECONDS)
    started_seconds = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)broken in a hook.*no checkpoint was written on the failure"):
        run_on_ranks(2, fail_and_save, tmp_path, 1, init=False, timeout=2 * SOON_SECONDS)
    assert time.monotonic() - started_seconds < SOON_SECONDS
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings(NO_PATHS)
def test_ranks_that_fail_together_save_together(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="broken in a hook"):
        run_on_ranks(2, fail_and_save, tmp_path, EVERY_RANK, init=False)
    assert is_checkpoint(tmp_path / "on_exception.ckpt")


@pytest.mark.parametrize(("layout", "point"), [(PP2, "training_step"), (DP2, "training_step"), (PP2, "cpu")])
def test_a_rank_that_waits_for_a_failed_one_is_ended(
    layout: Layout, point: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.5)
    started_seconds = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 of 2 failed:\\nthe process ended by exit code 1"):
        run_on_ranks(2, fail_and_linger, layout, point, init=False, timeout=2 * SOON_SECONDS)
    assert time.monotonic() - started_seconds < SOON_SECONDS - 5
    last_words = capfd.readouterr().out
    assert "[rank 0] rank 0 ends because rank 1 failed" in last_words and f"broken in {point}" in last_words


@pytest.mark.parametrize(
    ("layout", "rank", "point"),
    [
        (PP2, 1, "training_step"),
        (PP2, 0, "the tail of the step"),
        (PP2, 1, "model"),
        (DP2, 1, "training_step"),
        (PP2, 0, "validation_step"),
        (DP2, 0, "configure_model"),
        (Layout(world=2, tp=2), 1, "a hook"),
    ],
)
def test_a_failure_ends_all_ranks_soon_and_all_report_it(
    layout: Layout, rank: int, point: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # The harness would end the others after two seconds; here it is the strategy that shall do it.
    monkeypatch.setattr(ranks, "GRACE_SECONDS", SOON_SECONDS)
    started_seconds = time.monotonic()
    with pytest.raises(RankFailed) as failure:
        run_on_ranks(2, fail, layout, rank, point, init=False, timeout=2 * SOON_SECONDS)
    elapsed_seconds = time.monotonic() - started_seconds
    shown = str(failure.value)
    assert elapsed_seconds < SOON_SECONDS, "a rank had to be ended from outside"
    assert "still running" not in shown and "stuck" not in shown
    assert shown.count(f"broken in {point}") >= 1
    if point != "model":
        assert "in break_at" in shown, "the traceback of the point itself is missing"
    other = 1 - rank
    # The other rank names the failure, in its own error or as its last words.
    printed = capfd.readouterr().out
    assert f"rank {rank} failed:" in shown or f"[rank {other}] rank {other} ends because rank {rank} failed" in printed
