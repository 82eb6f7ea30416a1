"""Batches that grow, and text that streams: every step is that of one device, also from a checkpoint elsewhere."""

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import ConfigurationError, MegatronStrategy
from lightning_megatron.data import BatchRamp
from lightning_megatron.lightning_modules import AdamWConfig, GPTDataModule, GPTModule, StreamingConfig
from lightning_megatron.trainer.callbacks import ThroughputMonitor
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.lightning_modules.corpus import SEQUENCE, config, data
from tests.trainer.fits import Parts, parts_apart, weights
from tests.trainer.layouts import PLAIN as ONE_DEVICE
from tests.trainer.layouts import QUIET, make_trainer

# A run that goes on need not save.
pytestmark = [pytest.mark.filterwarnings(QUIET), pytest.mark.filterwarnings("ignore:Be aware that when using")]

RAMP = BatchRamp(first_size=4, last_size=12, step_size=4, ramp_samples=16)
SIZES = [4, 4, 8, 12, 12]
KINDS = ["ramp", "streaming"]

PLAIN = "plain"
SAVER = "dp2"
LAYOUTS: dict[str, tuple[int, int, dict[str, int]]] = {
    # Processes, data-parallel ranks, and arguments of the strategy.
    PLAIN: (1, 1, {}),
    "pp2 dp2": (4, 2, {"pipeline_model_parallel_size": 2, "microbatch_size": 2}),
    "pp2": (2, 1, {"pipeline_model_parallel_size": 2, "microbatch_size": 2}),
    "pp2 vp2 by number": (
        2,
        1,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "num_microbatches": 2},
    ),
    "dp2": (2, 2, {"microbatch_size": 2}),
    "dp2 whole": (2, 2, {}),
    "one": (1, 1, {"microbatch_size": 2}),
    "tp2": (2, 1, {"tensor_model_parallel_size": 2, "microbatch_size": 4}),
}


class Noted(L.Callback):
    """The loss and the rows of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rows: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        self.rows.append(len(batch["tokens"]))


def trainer_of(name: str, **options: Any) -> L.Trainer:
    world, _, strategy = LAYOUTS[name]
    options = {"max_epochs": -1, "limit_val_batches": 0, "gradient_clip_val": 0.5} | options
    if name != PLAIN:
        options["strategy"] = MegatronStrategy(**strategy, timeout_seconds=60)  # type: ignore[arg-type]
    return make_trainer(ONE_DEVICE, devices=world, **options)


def module_of() -> GPTModule:
    torch.manual_seed(7)
    architecture = config(num_layers=4, attention_dropout=0.1, hidden_dropout=0.1)
    return GPTModule(architecture, AdamWConfig(lr=1e-2, warmup_steps=1, total_steps=len(SIZES)))


def data_of(kind: str, folder: Path, **options: Any) -> GPTDataModule:
    [tokenizer] = (folder / "cache").glob("tokenizer-*.json")
    options = {"global_batch_size": 12, "batch_ramp": RAMP, "tokenizer": str(tokenizer)} | options
    if kind == "streaming":
        options["streaming"] = StreamingConfig(window_documents=4)
    return data(folder, **options)


def run(name: str, folder: Path, kind: str, ckpt: str | None, steps: int) -> tuple[Noted, Parts]:
    """What a run noted and ended with; that of `SAVER` from the first step leaves a checkpoint after each."""
    noted, module = Noted(), module_of()
    saves = name == SAVER and ckpt is None
    saver = ModelCheckpoint(folder / kind, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [noted, *([saver] if saves else [])]
    trainer = trainer_of(name, max_steps=steps, callbacks=callbacks, enable_checkpointing=saves)
    trainer.fit(module, datamodule=data_of(kind, folder), ckpt_path=ckpt)
    return noted, weights(module)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("growing")
    data(path).setup("fit")  # the text is prepared once, for all layouts
    return path


@functools.cache
def runs(name: str, folder: Path, kind: str, ckpt: str | None = None) -> Any:
    return run_on_ranks(LAYOUTS[name][0], run, name, folder, kind, ckpt, len(SIZES), init=False)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", every_nth([name for name in LAYOUTS if name != PLAIN], 2))
def test_steps_across_the_ramp_are_those_of_one_device(name: str, kind: str, folder: Path) -> None:
    [(wanted, full)] = runs(PLAIN, folder, kind)
    assert wanted.rows == SIZES
    assert wanted.losses[-1] < wanted.losses[0] - 0.05, "it learns, so a step that is left out would show"
    for found, parts in runs(name, folder, kind):
        assert found.losses == pytest.approx(wanted.losses, abs=1e-9)
        assert found.rows == [size // LAYOUTS[name][1] for size in SIZES]
        assert parts_apart(parts, full) < 1e-9


# A layout, and after how many steps it goes on.
PLACES = {
    "one after 1": ("one", 1),
    "dp2 after 3": ("dp2", 3),
    "pp2 after 2": ("pp2", 2),
    "pp2 dp2 after 3": ("pp2 dp2", 3),
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", PLACES)
def test_a_run_goes_on_in_the_midst_of_the_ramp_on_any_layout(position: str, kind: str, folder: Path) -> None:
    name, step = PLACES[position]
    [(wanted, full)] = runs(PLAIN, folder, kind)
    first, _ = runs(SAVER, folder, kind)[0]
    assert first.losses == pytest.approx(wanted.losses, abs=1e-9)
    for found, parts in runs(name, folder, kind, str(folder / kind / f"step={step}.ckpt")):
        assert found.rows == [size // LAYOUTS[name][1] for size in SIZES[step:]]
        assert found.losses == pytest.approx(wanted.losses[step:], abs=1e-9)
        assert parts_apart(parts, full) < 1e-9


# --- what is counted and refused --------------------------------------------------------------------------------------


def test_the_tokens_of_a_step_are_those_of_its_batch(folder: Path) -> None:
    batches: list[int] = []

    class Counted(GPTModule):
        def batch_tokens(self, batch: Any) -> int:
            batches.append(super().batch_tokens(batch))
            return batches[-1]

    module = Counted(config())
    trainer = trainer_of("one", max_steps=5, callbacks=[ThroughputMonitor(every_n_batches=1)])
    trainer.fit(module, datamodule=data_of("ramp", folder))
    # The first batch warms up.
    assert batches == [size * SEQUENCE for size in SIZES[1:]]


def test_ramps_and_microbatches_that_do_not_fit_are_faults(folder: Path) -> None:
    text = data_of("ramp", folder)
    for strategy, shown in (
        ({"microbatch_size": 2, "num_microbatches": 2}, "both say how a batch is cut"),
        ({"microbatch_size": -1}, r"microbatch_size \(-1\) must be at least 1"),
        ({"microbatch_size": 8}, r"4 as their greatest divisor.*\(1 x 8 = 8\)"),
        (
            {"microbatch_size": 8},
            r"global_batch_size \(12\) must be a multiple of data-parallel size x microbatch_size",
        ),
    ):
        trainer = make_trainer(ONE_DEVICE, strategy=MegatronStrategy(**strategy), max_steps=1)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=shown):
            trainer.fit(module_of(), datamodule=text)
    uneven = data_of("ramp", folder, batch_ramp=None, global_batch_size=6)
    trainer = make_trainer(ONE_DEVICE, strategy=MegatronStrategy(microbatch_size=4), max_steps=1)
    with pytest.raises(ConfigurationError, match="microbatch_size"):
        trainer.fit(module_of(), datamodule=uneven)


def test_another_batch_size_cannot_go_on_with_a_stream(folder: Path) -> None:
    runs(SAVER, folder, "streaming")
    trainer = trainer_of("one", max_steps=5)
    text = data_of("streaming", folder, batch_ramp=None)
    with pytest.raises(ValueError, match="this run has 12, one for each sample"):
        trainer.fit(module_of(), datamodule=text, ckpt_path=str(folder / "streaming" / "step=1.ckpt"))
