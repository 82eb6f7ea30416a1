"""What the callbacks measure reaches the progress bar, TensorBoard and CSV files, all at once, on several ranks."""

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_megatron.trainer.callbacks import MemoryMonitor, StepTimeline, ThroughputMonitor
from tests.harness.ranks import run_on_ranks
from tests.trainer.callbacks.small_gpt import LAYOUTS, train
from tests.trainer.layouts import QUIET

pytestmark = pytest.mark.filterwarnings(QUIET)
LAYOUT = LAYOUTS["pp2"]
BAR = {"tokens/s", "TFLOP/s/device", "MFU"}
LOGGED = BAR | {"HFU", "data_wait_s", "memory/fullest_rank", "memory/planned_gb", "memory/setup_resident_gb"}


class Bar(TQDMProgressBar):
    """Remembers what it shows; on ranks that show nothing it is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        shown = super().get_metrics(trainer, pl_module)
        self.seen |= set(shown)
        return shown


def logged(folder: str) -> set[str]:
    """What the bar of this rank showed."""
    bar = Bar()
    loggers = [CSVLogger(folder, name="csv", version=""), TensorBoardLogger(folder, name="board", version="")]
    callbacks = [
        ThroughputMonitor(every_n_batches=2, device_peak_flops=1e12),
        MemoryMonitor(),
        StepTimeline(step=2),
        bar,
    ]
    train(LAYOUT, callbacks, logger=loggers, num_batches=6, enable_progress_bar=True, log_every_n_steps=1)
    return bar.seen


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """A folder with what loggers wrote, and what the first rank's bar showed."""
    folder = tmp_path_factory.mktemp("logged")
    shown, _ = run_on_ranks(LAYOUT.world, logged, str(folder), init=False, timeout=120)
    return folder, shown


def test_the_bar_shows_speeds_and_files_have_everything(run: tuple[Path, set[str]]) -> None:
    folder, shown = run
    assert shown >= BAR and not shown & (LOGGED - BAR)
    with (folder / "csv" / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {name for line in lines for name, value in line.items() if value} >= LOGGED
    # A step of all ranks is a file of its own, where the first logger writes.
    assert (folder / "csv" / "step_2.json").is_file() and (folder / "csv" / "step_2.svg").is_file()


def test_tensorboard_has_everything(run: tuple[Path, set[str]]) -> None:
    folder, _ = run
    events = EventAccumulator(str(folder / "board")).Reload()
    assert set(events.Tags()["scalars"]) >= LOGGED
    assert all(event.value > 0 for event in events.Scalars("tokens/s"))
