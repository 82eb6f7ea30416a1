"""Each flag of the Trainer that says what runs, how much of it and when does under every layout what it does on one
device: the same batches in the same order, the same counters, metrics and weights."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

from tests.harness.sample import diagonal
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.lightning_api.test_ledger import LAYOUTS, Case, Ledger, Record, discrepancies, fit, record
from tests.trainer.modules import Data, Measured, Small


def loops(layout: Layout, module: L.LightningModule | None = None, **options: Any) -> Record:
    """All four loops of one Trainer."""
    ledger = Ledger()
    module = module if module is not None else Measured()
    trainer = make_trainer(layout, callbacks=[ledger], **({"max_epochs": 1} | options))
    trainer.fit(module, Data())
    returned = [trainer.validate(module, Data(), verbose=False), trainer.test(module, Data(), verbose=False)]
    predicted = trainer.predict(module, Data())
    return record(trainer, ledger, returned=returned) | {"own predictions": predicted, "batches": len(predicted or ())}


def limit_all(layout: Layout, value: Any) -> Record:
    names = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
    return loops(layout, **dict.fromkeys(names, value))


class Stops(Small):
    """Asks to stop after the second batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2:
            self.trainer.should_stop = True


class Gradients(Small):
    """Differentiates by its inputs in validation, as a physics-informed model or a saliency map does."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("is_inference", float(torch.is_inference_mode_enabled()))
        with torch.enable_grad():
            inputs = batch[0].clone().requires_grad_()
            [slope] = torch.autograd.grad(self.logits(inputs).square().sum(), inputs)
        self.log("slope", slope.square().sum(-1).mean())


class CountsLoaders(Data):
    """Counts how often its loaders are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def train_dataloader(self) -> Any:
        self.asked.append(f"train {self.trainer.current_epoch}")  # type: ignore[union-attr]
        return super().train_dataloader()

    def val_dataloader(self) -> Any:
        self.asked.append(f"val {self.trainer.current_epoch}")  # type: ignore[union-attr]
        return super().val_dataloader()


def reload_loaders(layout: Layout, every: int) -> Record:
    data = CountsLoaders()
    return fit(layout, data=data, max_epochs=4, reload_dataloaders_every_n_epochs=every) | {"asked": data.asked}


class Rows(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, list[str], float]] = []

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, sorted(metrics), float(sum(metrics.values()))))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def log_rows(layout: Layout, every: int) -> Record:
    logger = Rows()
    ledger = Ledger()
    trainer = make_trainer(layout, callbacks=[ledger], logger=logger, log_every_n_steps=every)
    trainer.fit(Measured(), Data())
    return record(trainer, ledger, rows=logger.rows)


def barebones(layout: Layout, _: Path) -> Record:
    module = Small()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=layout.world,
        strategy=layout.strategy(),
        precision="64-true",
        max_epochs=1,
        barebones=True,
        use_distributed_sampler=False,
    )
    trainer.fit(module, Data())
    return {"step": trainer.global_step, "loss": float(loss_of(module, layout))}


def loss_of(module: Small, layout: Layout) -> Tensor:
    [metrics] = make_trainer(layout).validate(module, Data(), verbose=False)
    return torch.tensor(metrics["val_loss"])


CASES: dict[str, Case] = {
    "limits as numbers": lambda layout, _: limit_all(layout, 2),
    "limits as fractions": lambda layout, _: limit_all(layout, 0.5),
    "limits of nothing but training": lambda layout, _: fit(layout, limit_train_batches=1.0, limit_val_batches=0),
    "no training batch": lambda layout, _: fit(layout, limit_train_batches=0),
    "overfit one batch": lambda layout, _: fit(layout, overfit_batches=1, max_epochs=3),
    "overfit half": lambda layout, _: fit(layout, Measured(), overfit_batches=0.5),
    "one sanity step": lambda layout, _: fit(layout, Measured(), num_sanity_val_steps=1),
    "all sanity steps": lambda layout, _: fit(layout, Measured(), num_sanity_val_steps=-1),
    "validate every second epoch": lambda layout, _: fit(layout, check_val_every_n_epoch=2, max_epochs=5),
    "validate every second batch": lambda layout, _: fit(layout, Measured(), val_check_interval=2),
    "validate twice an epoch": lambda layout, _: fit(layout, Measured(), val_check_interval=0.5),
    "validate every third batch of all": lambda layout, _: fit(
        layout, val_check_interval=3, check_val_every_n_epoch=None
    ),
    "fast_dev_run": lambda layout, _: loops(layout, fast_dev_run=True),
    "fast_dev_run of two": lambda layout, _: loops(layout, fast_dev_run=2),
    "max_steps": lambda layout, _: fit(layout, max_steps=6, max_epochs=-1),
    "max_steps while accumulating": lambda layout, _: fit(
        layout, max_steps=3, max_epochs=-1, accumulate_grad_batches=3
    ),
    "no step at all": lambda layout, _: fit(layout, max_steps=0),
    "no epoch at all": lambda layout, _: fit(layout, max_epochs=0),
    "min_steps": lambda layout, _: fit(layout, Stops(), max_epochs=3, min_steps=6),
    "min_epochs": lambda layout, _: fit(layout, Stops(), max_epochs=3, min_epochs=2),
    "stopped by the module": lambda layout, _: fit(layout, Stops(), max_epochs=3),
    "no time": lambda layout, _: fit(layout, max_time={"seconds": 0}),
    "enough time": lambda layout, _: fit(layout, max_time="00:01:00:00", max_epochs=1),
    "a left-over batch of a window": lambda layout, _: fit(
        layout, Measured(), accumulate_grad_batches=3, gradient_clip_val=0.05
    ),
    "clipping by value over a window": lambda layout, _: fit(
        layout, accumulate_grad_batches=3, gradient_clip_val=0.01, gradient_clip_algorithm="value"
    ),
    "detect_anomaly": lambda layout, _: fit(layout, detect_anomaly=True, max_epochs=1),
    "deterministic": lambda layout, _: fit(layout, deterministic="warn", max_epochs=1),
    "gradients in validation": lambda layout, _: fit(layout, Gradients(), inference_mode=False, max_epochs=1),
    "loaders of every epoch": lambda layout, _: reload_loaders(layout, 1),
    "loaders of every second epoch": lambda layout, _: reload_loaders(layout, 2),
    "log every third step": lambda layout, _: log_rows(layout, 3),
    "barebones": barebones,
    "profiler": lambda layout, _: fit(layout, profiler="simple", max_epochs=1),
}


CELLS = diagonal([(layout, case) for layout in ("one", "pp2", "dp2") for case in CASES])


@pytest.mark.matrix
@pytest.mark.parametrize(("layout", "case"), CELLS)
def test_a_flag_means_what_it_means_on_one_device(layout: str, case: str) -> None:
    names = [name for chosen, name in CELLS if chosen == layout]
    assert discrepancies(__name__, names, LAYOUTS[layout], case, list(CASES)) == []
