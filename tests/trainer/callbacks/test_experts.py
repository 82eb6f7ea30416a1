"""The monitor of experts logs the same on every rank and layout, as often as it is asked to, and draws."""

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron import ConfigurationError
from lightning_megatron.lightning_modules import AdamWConfig, GPTModule
from lightning_megatron.models import GPTModel
from lightning_megatron.moe.load_balancing import expert_load
from lightning_megatron.trainer.callbacks import ExpertMonitor
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import PLAIN, QUIET, Layout, make_trainer
from tests.trainer.small_experts import CONFIG, Language, Rows, Seen, fit

pytestmark = pytest.mark.filterwarnings(QUIET)
LAYOUTS = {
    "alone": Layout(),
    "pp2, a stage without experts": Layout(world=2, pp=2, microbatches=2),
    "pp2 vp2": Layout(world=2, pp=2, vp=2, microbatches=2),
    "dp2": Layout(world=2),
}
TOLERANCE = 1e-9


def fit_accumulated(layout: Layout) -> Seen:
    monitor = ExpertMonitor(per_layer=True, per_expert=True)
    return fit(layout, accumulate_grad_batches=2, callbacks=(monitor,))


@pytest.fixture(scope="module")
def plain() -> Seen:
    return run_on_ranks(1, fit_accumulated, PLAIN, init=False)[0]


def test_numbers_are_those_of_the_step(plain: Seen) -> None:
    # Nothing before the first step is over; then those of the step, until the next is.
    assert [bool(metrics) for metrics in plain.metrics] == [False, True, True, True]
    assert plain.metrics[1] == plain.metrics[2] != plain.metrics[3]
    reports, metrics = plain.reports[1], plain.metrics[1]
    for layer, report in reports.items():
        load_E = expert_load(report.counts_E.unsqueeze(0), torch.float64)[0]
        for expert, value in enumerate(load_E.tolist()):
            assert metrics[f"experts/{layer}/load_{expert}"] == pytest.approx(value)
        dropped = 1 - int(report.accepted_E.sum()) / int(report.counts_E.sum())
        assert 0 < metrics[f"experts/{layer}/dropped_share"] == pytest.approx(dropped)
        assert metrics[f"experts/{layer}/z_loss"] == pytest.approx(float(report.losses["z"]))
    assert metrics["experts/max_load"] == max(metrics[f"experts/{layer}/max_load"] for layer in reports) > 1
    assert {"experts/balance_loss_sequence", "experts/balance_loss_global", "experts/min_load"} <= {*metrics}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_of_any_layout_logs_what_one_device_does(layout: str, plain: Seen) -> None:
    for seen in run_on_ranks(LAYOUTS[layout].world, fit_accumulated, LAYOUTS[layout], init=False, timeout=120):
        assert len(seen.metrics) == len(plain.metrics)
        for metrics, wanted in zip(seen.metrics, plain.metrics, strict=True):
            assert {*metrics} == {*wanted}
            assert all(abs(metrics[name] - value) < TOLERANCE for name, value in wanted.items())


def logged_and_drawn(layout: Layout, folder: str) -> tuple[list[str], set[str]]:
    """The steps of which the logger has loads, and what stands in the progress bar."""
    monitor = ExpertMonitor(every_n_steps=2, picture_every_n_steps=3)
    logger = CSVLogger(folder, name="", version="")
    trainer = make_trainer(layout, max_epochs=1, callbacks=[monitor], logger=logger, log_every_n_steps=2)
    trainer.fit(Language(), Rows(20))
    with (Path(folder) / "metrics.csv").open() as file:
        steps = [line["step"] for line in csv.DictReader(file) if line["experts/min_load"]]
    return steps, {*trainer.progress_bar_metrics}


def test_a_picture_is_written_and_loads_are_logged_every_n_steps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    layout = Layout(world=2, pp=2, microbatches=2)
    steps, shown = run_on_ranks(2, logged_and_drawn, layout, str(tmp_path), init=False)[0]
    # Of five, which loggers count from 0.
    assert steps == ["1", "3"]
    assert {name for name in shown if name.startswith("experts")} == {"experts/max_load"}
    assert (tmp_path / "experts.png").read_bytes().startswith(b"\x89PNG")


def monitors_of(with_own: bool, has_experts: bool) -> list[tuple[bool, int]]:
    """Of the Trainer's monitors after a fit of the ready module: whether they log each expert."""
    config = (
        CONFIG
        if has_experts
        else GPTModel(CONFIG).config.__class__(
            num_layers=1, hidden_size=16, num_attention_heads=4, vocab_size=37, max_sequence_length=8
        )
    )
    callbacks = [ExpertMonitor(per_expert=True)] if with_own else []
    trainer = make_trainer(Layout(), max_epochs=1, callbacks=callbacks)

    class Named(Rows):
        def train_dataloader(self) -> Any:
            rows = super().train_dataloader().dataset
            batch = [{"tokens": t, "labels": t, "loss_mask": mask} for t, mask in rows]
            return torch.utils.data.DataLoader(batch, batch_size=4)  # type: ignore[arg-type]

        val_dataloader = train_dataloader

    trainer.fit(GPTModule(config, AdamWConfig(warmup_steps=1)), Named(8))
    assert any(name.startswith("experts") for name in trainer.callback_metrics) == has_experts
    monitors = [c for c in trainer.callbacks if isinstance(c, ExpertMonitor)]  # type: ignore[attr-defined]
    return [(monitor.per_expert, len(trainer.callback_metrics) > 10) for monitor in monitors]


def test_the_ready_module_has_a_monitor_by_itself_and_the_users_replaces_it() -> None:
    assert run_on_ranks(1, monitors_of, False, True, init=False) == [[(False, False)]]
    assert run_on_ranks(1, monitors_of, True, True, init=False) == [[(True, True)]]
    assert run_on_ranks(1, monitors_of, False, False, init=False) == [[]]


class Dense(Language):
    def __init__(self) -> None:
        super().__init__(
            CONFIG.__class__(num_layers=1, hidden_size=16, num_attention_heads=4, vocab_size=37, max_sequence_length=8)
        )


def test_what_is_wrong_is_reported_before_the_first_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"every_n_steps \(-1\).*\n.*picture_folder"):
        ExpertMonitor(every_n_steps=-1, picture_folder="here")
    with pytest.raises(ConfigurationError, match="no GPTModel of Dense has experts"):
        make_trainer(PLAIN, callbacks=[ExpertMonitor()]).fit(Dense(), Rows(4))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    trainer = make_trainer(
        PLAIN,
        callbacks=[ExpertMonitor(every_n_steps=7, picture_every_n_steps=1)],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=5,
    )
    with pytest.raises(ConfigurationError) as raised:
        trainer.fit(Language(), Rows(4))
    assert "may be 5 or 10" in str(raised.value) and "lightning_megatron[plot]" in str(raised.value)
