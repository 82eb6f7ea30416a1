"""Lightning's callbacks that watch, save, stop, average, tune and write do under every layout what they do on one
device."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BasePredictionWriter,
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from tests.harness.sample import diagonal
from tests.trainer.fits import weights
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.lightning_api.test_ledger import LAYOUTS, Case, Ledger, Record, discrepancies, fit, record
from tests.trainer.modules import Data, Measured, OwnPipeline, Scheduled, Small


class Watched(Scheduled):
    """Its `watched` metric falls, then rises; `broken` becomes no number."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("watched", abs(self.current_epoch - 2.0))
        self.log("broken", float("nan") if self.current_epoch == 1 else 1.0)


# --- saving -----------------------------------------------------------------------------------------------------------


def saves(layout: Layout, folder: Path, **options: Any) -> Record:
    """The names of what was saved, which is best and last, and how training goes on from the last."""
    saver = ModelCheckpoint(folder, **({"filename": "{epoch}-{step}"} | options))
    ledger = Ledger()
    trainer = make_trainer(
        layout, max_epochs=4, callbacks=[saver, ledger], limit_val_batches=2, enable_checkpointing=True
    )
    module = Watched()
    trainer.fit(module, Data())
    trainer.strategy.barrier()
    last = folder / "last.ckpt"
    found = record(
        trainer,
        ledger,
        names=sorted(path.name for path in folder.iterdir()),
        best=os.path.basename(saver.best_model_path),
        score=None if saver.best_model_score is None else float(saver.best_model_score),
        kept=sorted(os.path.basename(path) for path in saver.best_k_models),
        last=os.path.basename(os.path.realpath(last)) if last.exists() else "none",
    )
    if saver.best_model_path:
        found["of the best"] = trainer.test(module, Data(), ckpt_path="best", verbose=False)
    if last.exists() and "every_n_train_steps" not in options:
        # Within an epoch Lightning would begin the data again; tests/trainer/resume/test_run_state.py has what we do.
        # Nobody reads while another saves over the last one.
        trainer.strategy.barrier()
        longer = make_trainer(layout, max_epochs=5)
        # Lightning would round the checkpoint to a module's float32 before it converts the module.
        longer.fit(Watched().double(), Data(), ckpt_path=last)
        module = longer.lightning_module  # type: ignore[assignment]
        found["resumed weights"] = weights(module)
    return found


# --- stopping ---------------------------------------------------------------------------------------------------------


def stops(layout: Layout, **options: Any) -> Record:
    stopping = EarlyStopping(**({"monitor": "watched", "patience": 1} | options))
    found = fit(layout, Watched(), callbacks=[stopping], max_epochs=7)
    best = float(stopping.best_score) if isinstance(stopping.best_score, Tensor) else stopping.best_score
    return found | {"stopped": stopping.stopped_epoch, "best": best, "waited": stopping.wait_count}


# --- averaging --------------------------------------------------------------------------------------------------------


class EverySecond(WeightAveraging):
    """Averages after every second step."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 2 == 0


def averages(layout: Layout, callback: L.Callback, module: L.LightningModule, **options: Any) -> Record:
    found = fit(layout, module, callbacks=[callback], **options)
    # What is left in the module after the fit is the average.
    return {"events": found["events"], "ended at": found["ended at"], "averaged weights": weights(module)}


# --- changing what is trained -----------------------------------------------------------------------------------------


class Unfreezes(BaseFinetuning):
    """Trains the last layer alone, and from the second epoch on everything."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.before, pl_module.net])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.before, pl_module.net], optimizer, lr=0.05)


class TrainsTheRest(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.3)


# --- writing ----------------------------------------------------------------------------------------------------------


class Writes(BasePredictionWriter):
    """Keeps what it would write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        self.written.append((batch_idx, indices, prediction))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.written.append((len(predictions), indices))


def writes(layout: Layout, _: Path) -> Record:
    writer = Writes()
    make_trainer(layout, callbacks=[writer]).predict(Small(), Data())
    return {"own written": writer.written, "batches": len(writer.written)}


def rates(layout: Layout, folder: Path) -> Record:
    """What a logger's file says on the rank that writes it."""
    logger = CSVLogger(folder, name="", version=0)
    monitor = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    trainer = make_trainer(layout, callbacks=[monitor], logger=logger)
    trainer.fit(Scheduled(), Data())
    trainer.strategy.barrier()
    lines = (folder / "version_0" / "metrics.csv").read_text().splitlines()
    table = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    return {"rows": [{name: float(value) for name, value in row.items() if value} for row in table]}


def looks(layout: Layout, folder: Path) -> Record:
    """Callbacks that only look on: bars, timers, throughput, functions."""
    seen: list[int] = []
    callbacks = [
        TQDMProgressBar(refresh_rate=1),
        Timer(duration="00:01:00:00"),
        ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=4),
        LambdaCallback(on_train_batch_end=lambda trainer, *_: seen.append(trainer.global_step)),
    ]
    logger = CSVLogger(folder, name="", version=0)
    options = {"enable_progress_bar": True, "enable_model_summary": True, "logger": logger}
    return fit(layout, Measured(), callbacks=callbacks, **options) | {"seen": seen}


class Rated(Small):
    lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def finds_rate(layout: Layout, folder: Path) -> Record:
    finder = LearningRateFinder(num_training_steps=24, min_lr=1e-3, max_lr=0.5)
    module = Rated()
    found = fit(layout, module, callbacks=[finder], default_root_dir=folder, max_epochs=7)
    assert module.lr != Rated.lr
    return found | {"rate": module.lr}


CASES: dict[str, Case] = {
    "the best two": lambda layout, folder: saves(layout, folder, monitor="watched", save_top_k=2, save_last="link"),
    "all, by steps": lambda layout, folder: saves(layout, folder, save_top_k=-1, every_n_train_steps=3, save_last=True),
    "the highest loss": lambda layout, folder: saves(
        layout, folder, monitor="train_loss", mode="max", filename="{epoch}-{train_loss:.3f}", save_last="link"
    ),
    "weights alone, every second epoch": lambda layout, folder: saves(
        layout, folder, every_n_epochs=2, save_top_k=-1, save_weights_only=True
    ),
    "after training, before validation": lambda layout, folder: saves(
        layout, folder, save_on_train_epoch_end=True, monitor="train_loss", save_top_k=1
    ),
    "stops at the bottom": lambda layout, _: stops(layout),
    "stops at no number": lambda layout, _: stops(layout, monitor="broken", patience=9),
    "stops at a threshold": lambda layout, _: stops(layout, stopping_threshold=1.5),
    "stops after training": lambda layout, _: stops(
        layout, monitor="train_loss", divergence_threshold=1.0, check_on_train_epoch_end=True
    ),
    "every second average": lambda layout, _: averages(layout, EverySecond(), Small()),
    "moving average": lambda layout, _: averages(layout, EMAWeightAveraging(decay=0.7), Small(), max_epochs=3),
    "moving average of parts": lambda layout, _: averages(layout, EMAWeightAveraging(decay=0.7), OwnPipeline()),
    "stochastic average": lambda layout, _: averages(
        layout, StochasticWeightAveraging(0.05, swa_epoch_start=1), Small(), max_epochs=4
    ),
    "thawed": lambda layout, _: fit(layout, TrainsTheRest(), callbacks=[Unfreezes()], max_epochs=3),
    "written predictions": writes,
    "rates": rates,
    "onlookers": looks,
    "a search for the rate": finds_rate,
}


CELLS = diagonal([(layout, case) for layout in ("pp2", "dp2") for case in CASES])


@pytest.mark.matrix
@pytest.mark.parametrize(("layout", "case"), CELLS)
def test_a_callback_does_what_it_does_on_one_device(layout: str, case: str) -> None:
    names = [name for chosen, name in CELLS if chosen == layout]
    assert discrepancies(__name__, names, LAYOUTS[layout], case, list(CASES)) == []
