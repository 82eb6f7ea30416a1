"""The callback counts each token of the global batch once, and only the time of training."""

import csv
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_megatron import ConfigurationError, MegatronStrategy, RecomputeConfig
from lightning_megatron.lightning_modules import AdamWConfig, GPTModule
from lightning_megatron.mesh import Sizes, ambient_mesh
from lightning_megatron.trainer.callbacks import ThroughputMonitor, throughput
from tests.harness.ranks import run_on_ranks
from tests.trainer.callbacks.small_gpt import CONFIG, Texts
from tests.trainer.layouts import QUIET, Layout, make_trainer, replica_of
from tests.trainer.modules import TwoCuts

pytestmark = pytest.mark.filterwarnings(QUIET)
ROWS, FLOPS = 4, 2 * 10**12
# Of a device, so that a process that works all the time is at a half.
PEAK = 4.0e12


class Clock:
    """A clock that the callback reads instead of the real one, moved by hand."""

    seconds = 100.0

    def __call__(self) -> float:
        return Clock.seconds


class Counted(L.LightningModule):
    """A module whose batch is 1 second of work on the first rank, and some more on each further one.

    If it is more, later dp ranks also have more tokens: the second twice as many as the first.
    """

    def __init__(self, extra_seconds: float) -> None:
        super().__init__()
        self.extra_seconds = extra_seconds
        self.layer = torch.nn.Linear(3, 1)

    def configure_model(self) -> None:
        # It is not used; without it tensor-parallel ranks would be refused.
        mesh = ambient_mesh()
        self.cut = TwoCuts(mesh.tp, mesh.sp, 0.1)

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

    callbacks = [ThroughputMonitor(every_n_batches=every, device_peak_flops=PEAK), Recorder()]
    trainer = make_trainer(layout, callbacks=callbacks, max_epochs=1, **options)
    rows = torch.utils.data.DataLoader(torch.ones(24, 3, dtype=torch.float64), batch_size=ROWS)
    trainer.fit(Counted(extra_seconds), rows, rows)
    return logged


def test_a_span_is_logged_when_it_is_full_and_the_first_batch_is_left_out() -> None:
    logged = speeds(Layout(is_plain=True))
    assert [set(numbers) for numbers in logged[:2]] == [set(), set()]
    assert logged[2] == {"tokens/s": ROWS, "TFLOP/s/device": 2.0, "MFU": 0.5}


def test_validation_does_not_count() -> None:
    # After batches 1, 2 and so on; each costs a thousand times a step.
    assert speeds(Layout(is_plain=True), val_check_interval=1)[4]["tokens/s"] == ROWS


@pytest.mark.parametrize(("layout", "dp_ranks"), [(Layout(world=2), 2), (Layout(world=2, tp=2), 1)])
def test_dp_ranks_count_and_model_parallel_ranks_do_not(layout: Layout, dp_ranks: int) -> None:
    for logged in run_on_ranks(layout.world, speeds, layout, init=False):
        each = float(dp_ranks)
        assert logged[2] == {"tokens/s": dp_ranks * ROWS, "TFLOP/s/device": each, "MFU": dp_ranks * 0.5 / 2}


def uneven_speeds(layout: Layout) -> list[dict[str, float]]:
    return speeds(layout, extra_seconds=0.75)


@pytest.mark.parametrize("layout", [Layout(world=2), Layout(world=2, tp=2)], ids=["dp2", "tp2"])
def test_ranks_whose_clocks_and_batches_differ_log_equal_numbers(layout: Layout) -> None:
    first, second = run_on_ranks(2, uneven_speeds, layout, init=False)
    assert first == second
    assert first[2]["tokens/s"] == (1 + 2 * (layout.dp > 1)) * ROWS
    assert len(first) == 6 and {*first[-1]} == {"tokens/s", "TFLOP/s/device", "MFU"}


class Recomputing(Counted):
    """The same, which does a quarter of its work again."""

    def batch_recomputed_flops(self, batch: Tensor, recompute: RecomputeConfig, sizes: Sizes) -> float:
        return FLOPS / 4 if recompute.granularity == "none" and sizes == Sizes() else 0.0


class SlowRows(torch.utils.data.Dataset[Tensor]):
    """Rows of which each takes a second and, on each further rank, two more."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        Clock.seconds += 1 + 2 * self.rank
        return torch.ones(3, dtype=torch.float64)


def logged_numbers(layout: Layout, module: Counted, data: Any, folder: str, **options: Any) -> list[dict[str, str]]:
    """The lines of the logger that have a new speed; on every rank those of the first."""
    Clock.seconds = 100.0
    throughput.perf_counter = Clock()  # type: ignore[attr-defined]
    monitor = ThroughputMonitor(every_n_batches=2, device_peak_flops=PEAK)
    logger = CSVLogger(folder, name="", version="")
    trainer = make_trainer(layout, callbacks=[monitor], max_epochs=1, logger=logger, limit_val_batches=0, **options)
    loader = torch.utils.data.DataLoader(data, batch_size=ROWS)
    trainer.fit(module, loader, loader)
    trainer.strategy.barrier()
    with (Path(folder) / "metrics.csv").open() as file:
        # Lightning logs the last one until there is another: spans end with the third batch and the fifth.
        return [line for line in csv.DictReader(file) if line.get("tokens/s")][::2]


def test_hfu_adds_the_recomputation_of_the_module(tmp_path: Path) -> None:
    lines = logged_numbers(
        Layout(is_plain=True), Recomputing(0.0), torch.ones(24, 3, dtype=torch.float64), str(tmp_path)
    )
    # Under a strategy that knows of no recomputation it is asked for none.
    assert [(line["MFU"], line["HFU"]) for line in lines] == [("0.5", "0.625")] * 2


def test_recomputed_flops_follow_the_strategys_configuration() -> None:
    [seen] = run_on_ranks(1, configurations, init=False)
    assert seen == [(RecomputeConfig(granularity="full"), Sizes(sequence_parallel=True))] * 3


def configurations() -> list[tuple[RecomputeConfig, Sizes]]:
    """What the ready module was asked under a strategy that recomputes, batch by batch."""
    seen = []

    class Asked(GPTModule):
        def batch_recomputed_flops(self, batch: Any, recompute: RecomputeConfig, sizes: Sizes) -> float:
            seen.append((recompute, sizes))
            return super().batch_recomputed_flops(batch, recompute, sizes)

    strategy = MegatronStrategy(recompute=RecomputeConfig(granularity="full"), sequence_parallel=True)
    monitor = ThroughputMonitor(every_n_batches=2, device_peak_flops=1e12)
    trainer = make_trainer(Layout(), strategy=strategy, callbacks=[monitor], max_epochs=1, precision="32-true")
    trainer.fit(Asked(CONFIG, AdamWConfig(warmup_steps=1)), Texts(4))
    shares = trainer.callback_metrics["HFU"] / trainer.callback_metrics["MFU"]
    # Whole layers again, of three times those and the head.
    assert 1.2 < shares < 4 / 3
    return seen


def waits(layout: Layout, folder: str) -> list[dict[str, str]]:
    return logged_numbers(layout, Counted(0.0), SlowRows(), folder)


@pytest.mark.parametrize(
    "layout", [Layout(is_plain=True), Layout(world=2), Layout(world=2, tp=2)], ids=["plain", "dp2", "tp2"]
)
def test_waiting_for_data_is_that_of_the_rank_that_waits_the_longest(layout: Layout, tmp_path: Path) -> None:
    for lines in run_on_ranks(layout.world, waits, layout, str(tmp_path), init=False):
        # A batch is four rows, of a second each, or of three on the second rank.
        assert [line["data_wait_s"] for line in lines] == [str(4.0 * (1 + 2 * (layout.world > 1)))] * len(lines)
        assert len(lines) == 2


def test_a_module_that_does_not_say_its_work_is_refused() -> None:
    trainer = make_trainer(Layout(is_plain=True), callbacks=[ThroughputMonitor()])
    with pytest.raises(ConfigurationError, match="batch_tokens"):
        trainer.fit(BoringModel())
