"""Lightning's own callbacks under the strategy decide and write what they decide and write on one device."""

import copy
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron.optim.config import OptimizerConfig
from tests.harness.ranks import run_on_ranks
from tests.trainer import modules, small_experts
from tests.trainer.fits import Parts, parts_apart, weights
from tests.trainer.layouts import PLAIN, Layout, make_trainer
from tests.trainer.modules import Data

# Lightning makes the average before the module becomes float64: it rounds to float32 at every step.
AVERAGE_TOLERANCE = 1e-6
LAYOUTS = {
    "pp2": Layout(world=2, pp=2, microbatches=2),
    "dp2": Layout(world=2),
    "tp2": Layout(world=2, tp=2),
}
ZERO_3 = Layout(world=2, optimizer=OptimizerConfig(kind="distributed_parameters"))


class Watched(modules.Scheduled):
    """Its `watched` metric is best in the second epoch and then grows for ever."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("watched", abs(self.current_epoch - 1.0) + self.logits(batch[0]).mean() * 1e-6)


def callbacks_of_a_run(layout: Layout, folder: Path) -> dict[str, Any]:
    here = folder / f"{layout.world}{layout.pp}{layout.tp}"
    best = ModelCheckpoint(
        here, "{epoch}-{step}", monitor="watched", save_top_k=2, save_last="link", save_weights_only=True
    )
    stopping = EarlyStopping("watched", patience=2)
    rates = LearningRateMonitor(logging_interval="step")
    logger = CSVLogger(here, name="logs", version=0)
    trainer = make_trainer(
        layout,
        max_epochs=9,
        callbacks=[best, stopping, rates],
        enable_checkpointing=True,
        logger=logger,
    )
    module = Watched()
    trainer.fit(module, Data())
    trainer.strategy.barrier()
    names = sorted(path.name for path in here.iterdir())
    return {
        "epochs": trainer.current_epoch,
        "best": Path(best.best_model_path).name,
        "score": float(best.best_model_score),  # type: ignore[arg-type]
        "names": names,
        "last": os.path.realpath(here / "last.ckpt").rsplit("/", 1)[-1],
        "kinds": {name: (here / name).is_dir() for name in names if name.endswith(".ckpt")},
        "rates": logged_rates(here / "logs" / "version_0" / "metrics.csv"),
        "stopped at": stopping.stopped_epoch,
    }


def logged_rates(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    column = lines[0].split(",").index("lr-SGD")
    return [rate for line in lines[1:] if (rate := line.split(",")[column])]


def test_checkpoints_stopping_and_rates_are_decided_as_on_one_device(tmp_path: Path) -> None:
    [wanted] = run_on_ranks(1, callbacks_of_a_run, PLAIN, tmp_path, init=False)
    assert wanted["stopped at"] == 3 and wanted["epochs"] == 4
    assert wanted["names"] == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "last.ckpt", "logs"]
    for layout in LAYOUTS.values():
        for found in run_on_ranks(layout.world, callbacks_of_a_run, layout, tmp_path, init=False):
            assert found.pop("score") == pytest.approx(wanted["score"], abs=1e-9)
            # Ours are directories, and so is what the link points to.
            assert set(found.pop("kinds").values()) == {True}
            assert found == {key: value for key, value in wanted.items() if key not in ("score", "kinds")}


def averaged_run(layout: Layout, folder: Path, module_name: str) -> dict[str, Any]:
    here = folder / f"average-{layout.world}{layout.pp}{layout.tp}"
    module_class = getattr(modules, module_name)
    module = module_class()
    average = EMAWeightAveraging(decay=0.5)
    saver = ModelCheckpoint(here, "{epoch}", save_top_k=-1, every_n_epochs=1)
    trainer = make_trainer(layout, max_epochs=2, callbacks=[average, saver], enable_checkpointing=True)
    trainer.fit(module, Data())
    found = {"averaged": weights(module)}
    live = module_class()
    make_trainer(layout, max_epochs=2).fit(live, Data())
    found["live"] = weights(live)

    # One more epoch from the middle ends where the run without a break does: averages and live weights came back.
    module = module_class()
    trainer = make_trainer(layout, max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.5)])
    trainer.fit(module, Data(), ckpt_path=here / "epoch=0.ckpt")
    found["resumed"] = weights(module)
    return found


@pytest.mark.filterwarnings(
    "ignore:Be aware that when using `ckpt_path`, callbacks used:UserWarning",
)
@pytest.mark.filterwarnings("ignore:.* may read weights. for these hooks all weights:UserWarning")
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (LAYOUTS["pp2"], "Small"),
        (LAYOUTS["pp2"], "OwnPipeline"),
        (LAYOUTS["tp2"], "Parallel"),
        (ZERO_3, "Small"),
        (ZERO_3, "OwnPipeline"),
    ],
)
def test_averaged_weights_and_their_checkpoint_are_those_of_one_device(
    layout: Layout, kind: str, tmp_path: Path
) -> None:
    [wanted] = run_on_ranks(1, averaged_run, PLAIN, tmp_path, kind, init=False)
    for found in run_on_ranks(layout.world, averaged_run, layout, tmp_path, kind, init=False):
        for key in ("averaged", "resumed"):
            assert parts_apart(found[key], wanted["averaged"]) < AVERAGE_TOLERANCE, key
    assert parts_apart(wanted["averaged"], wanted["live"]) > 1e-3


def stochastic_run(layout: Layout) -> Parts:
    module = modules.Small()
    average = StochasticWeightAveraging(0.05, swa_epoch_start=1)
    make_trainer(layout, max_epochs=4, callbacks=[average]).fit(module, Data())
    return weights(module)


@pytest.mark.filterwarnings("ignore:.* may read weights. for these hooks all weights:UserWarning")
def test_stochastic_averages_of_shards_are_those_of_one_device() -> None:
    [wanted] = run_on_ranks(1, stochastic_run, PLAIN, init=False)
    for found in run_on_ranks(2, stochastic_run, ZERO_3, init=False):
        assert parts_apart(found, wanted) < AVERAGE_TOLERANCE


class Copies(L.Callback):
    """Copies the Trainer before it reads, and the module after each batch, as averages and teachers do."""

    def __init__(self) -> None:
        self.apart: list[float] = []

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert copy.deepcopy(trainer).strategy is not trainer.strategy

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        copied, before = copy.deepcopy(module), gradients_of(module)
        if small_experts.model_of(copied).mesh.pp.size > 1:
            # A copy of a stage runs alone, and cannot.
            self.apart.append(0.0)
            return
        losses = [small_experts.Language.loss(one, batch) for one in (module, copied)]  # type: ignore[arg-type]
        losses[1].backward()
        assert gradients_of(copied) != before == gradients_of(module)
        self.apart.append(float((losses[0] - losses[1]).detach()))


def gradients_of(module: L.LightningModule) -> list[float]:
    return [0.0 if one.grad is None else float(one.grad.norm()) for one in module.parameters()]


def copied_within_a_fit(layout: Layout) -> list[float]:
    copies = Copies()
    trainer = make_trainer(layout, max_steps=2, callbacks=[copies], limit_val_batches=0)
    trainer.fit(small_experts.Language(), small_experts.Rows())
    return copies.apart


def test_the_trainer_and_the_module_can_be_copied_within_a_fit() -> None:
    for layout in (PLAIN, LAYOUTS["tp2"], LAYOUTS["pp2"]):
        assert run_on_ranks(layout.world, copied_within_a_fit, layout, init=False) == [[0.0, 0.0]] * layout.world
