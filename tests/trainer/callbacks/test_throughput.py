"""The callback counts each token of the global batch once, and only the time of training."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from lightning_megatron import ConfigurationError
from lightning_megatron.trainer.callbacks import Throughput, throughput
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import QUIET, Layout, make_trainer, replica_of

pytestmark = pytest.mark.filterwarnings(QUIET)
ROWS, FLOPS = 4, 1000


class Clock:
    """A clock that the callback reads instead of the real one, moved by hand."""

    seconds = 100.0

    def __call__(self) -> float:
        return Clock.seconds


class Counted(L.LightningModule):
    """A module whose batch is 1 second of work on the first rank, and some more on each further one.

    If it is more, later replicas also have more tokens: the second twice as many as the first.
    """

    def __init__(self, extra_seconds: float) -> None:
        super().__init__()
        self.extra_seconds = extra_seconds
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        Clock.seconds += 1 + self.extra_seconds * self.trainer.global_rank
        loss: Tensor = self.layer(batch).mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        Clock.seconds += 1000

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def batch_tokens(self, batch: Tensor) -> int:
        rank, _ = replica_of(self.trainer)
        return batch.shape[0] * (1 + rank * (self.extra_seconds > 0))

    def batch_flops(self, batch: Tensor) -> float:
        return float(FLOPS)


def speeds(layout: Layout, every: int = 2, extra_seconds: float = 0.0, **options: Any) -> list[dict[str, float]]:
    """What was logged after every batch."""
    Clock.seconds = 100.0
    throughput.perf_counter = Clock()  # type: ignore[attr-defined]
    logged: list[dict[str, float]] = []

    class Recorder(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            logged.append({name: float(value) for name, value in trainer.progress_bar_metrics.items()})

    callbacks = [Throughput(every_n_batches=every, device_peak_flops=2000.0), Recorder()]
    trainer = make_trainer(layout, callbacks=callbacks, max_epochs=1, **options)
    rows = torch.utils.data.DataLoader(torch.ones(24, 3, dtype=torch.float64), batch_size=ROWS)
    trainer.fit(Counted(extra_seconds), rows, rows)
    return logged


def test_a_span_is_told_when_it_is_full_and_the_first_batch_is_left_out() -> None:
    logged = speeds(Layout(is_plain=True))
    assert [set(numbers) for numbers in logged[:2]] == [set(), set()]
    assert logged[2] == {"tokens/s": ROWS, "FLOP/s": FLOPS, "MFU": 0.5}


def test_validation_does_not_count() -> None:
    # After batches 1, 2 and so on; each costs a thousand times a step.
    assert speeds(Layout(is_plain=True), val_check_interval=1)[4]["tokens/s"] == ROWS


@pytest.mark.parametrize(("layout", "replicas"), [(Layout(world=2), 2), (Layout(world=2, tp=2), 1)])
def test_replicas_count_and_ranks_of_one_replica_do_not(layout: Layout, replicas: int) -> None:
    for logged in run_on_ranks(layout.world, speeds, layout, init=False):
        assert logged[2] == {"tokens/s": replicas * ROWS, "FLOP/s": replicas * FLOPS, "MFU": replicas * 0.5 / 2}


def uneven_speeds(layout: Layout) -> list[dict[str, float]]:
    return speeds(layout, extra_seconds=0.75)


@pytest.mark.parametrize("layout", [Layout(world=2), Layout(world=2, tp=2)], ids=["dp2", "tp2"])
def test_ranks_whose_clocks_and_batches_differ_log_equal_numbers(layout: Layout) -> None:
    first, second = run_on_ranks(2, uneven_speeds, layout, init=False)
    assert first == second
    assert first[2]["tokens/s"] == (1 + 2 * (layout.dp > 1)) * ROWS
    assert len(first) == 6 and {*first[-1]} == {"tokens/s", "FLOP/s", "MFU"}


def test_a_module_that_does_not_say_its_work_is_refused() -> None:
    trainer = make_trainer(Layout(is_plain=True), callbacks=[Throughput()])
    with pytest.raises(ConfigurationError, match="batch_tokens"):
        trainer.fit(BoringModel())
