"""What ranks of one model log differently is told once, and what they log alike is not."""

import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import grad_norm as own_grad_norm

from lightning_megatron import grad_norm
from lightning_megatron.trainer.step.first_steps import all_close, differing_values
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small


class LogsNorms(L.Callback):
    def __init__(self, of_model: bool) -> None:
        self.of_model = of_model

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        module.log_dict(grad_norm(module) if self.of_model else own_grad_norm(module, 2))  # type: ignore[arg-type]


class LogsAtTheEnd(Small):
    """Logs a norm of the weights that its rank holds when an epoch has ended."""

    def on_train_epoch_end(self) -> None:
        self.log("norm", torch.stack([weight.norm() for weight in self.parameters()]).norm())
        # A value for each class, as a metric may have.
        self.trainer.callback_metrics["classes"] = torch.ones(3)


def warned(layout: Layout, of_model: bool, module: type[Small] = Small) -> list[str]:
    callbacks = [LogsNorms(of_model)] if module is Small else []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make_trainer(layout, callbacks=callbacks).fit(module(), Data())
    return [str(one.message) for one in found if "logged values differ" in str(one.message)]


def test_norms_of_what_a_rank_holds_are_told_once() -> None:
    tp2, pp2 = Layout(world=2, tp=2), Layout(world=2, pp=2, microbatches=2)
    [by_parts], _ = run_on_ranks(2, warned, tp2, False, init=False)
    assert "  - grad_2.0_norm_total (rank 0: " in by_parts and "given by grad_norm(self)" in by_parts
    [by_stages], _ = run_on_ranks(2, warned, pp2, False, init=False)
    assert "  - grad_2.0_norm/net.0.weight (rank 1: " in by_stages and ", no other)" in by_stages
    for layout in (tp2, pp2):
        assert run_on_ranks(2, warned, layout, True, init=False) == [[], []]


def test_what_the_end_of_an_epoch_logs_is_looked_at_too() -> None:
    [found], nothing = run_on_ranks(2, warned, Layout(world=2, tp=2), False, LogsAtTheEnd, init=False)
    assert "  - norm (rank 0: " in found and not nothing


def test_values_are_compared_but_for_rounding() -> None:
    assert all_close([1.0, 1.00001, float(1)]) and all_close([float("nan")] * 2) and all_close([float("inf")] * 2)
    assert not all_close([1.0, 1.001]) and not all_close([1.0, float("nan")])
    lines = differing_values([{"a": 1.0, "b": 2.0}, {"b": 3.0, "c": 4.0}], (2, 5))
    assert lines == ["a (rank 2: 1, no other)", "b (rank 2: 2, rank 5: 3)", "c (rank 5: 4, no other)"]
