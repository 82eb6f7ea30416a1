"""The tour computes what the package computes: the same losses and weights on the same layout, from the same start."""

import importlib.util
from pathlib import Path
from types import ModuleType

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_megatron import grad_norm
from lightning_megatron.models import GPTConfig, GPTModel
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import Layout, make_trainer

TOUR = Path(__file__).resolve().parents[2] / "docs" / "tour.py"
CONFIG = GPTConfig(num_layers=4, hidden_size=16, num_attention_heads=4, vocab_size=32, max_sequence_length=8)
LAYOUT = Layout(world=4, tp=2, pp=2, microbatches=4)
NUM_STEPS, CLIP = 3, 0.1
# Sums of float64 in another order, through three steps.
TOLERANCE = 1e-12


def tour() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tour", TOUR)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batches() -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels; microbatches have unequally many labels, and one of them none."""
    drawn = torch.randint(32, (NUM_STEPS, 8, 9), generator=torch.Generator().manual_seed(3))
    labels = drawn[:, :, 1:].clone()
    labels[:, 2:4] = -100
    labels[:, 5, 3:] = -100
    return list(zip(drawn[:, :, :-1], labels, strict=True))


def train_by_tour(whole: dict[str, Tensor]) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    page = tour()
    config = page.Config(layers=4, hidden=16, heads=4, vocabulary=32, sequence=8)
    sizes = {"tp": LAYOUT.tp, "pp": LAYOUT.pp, "num_microbatches": LAYOUT.microbatches}
    steps, weights = page.train(whole, batches(), config, **sizes, largest_norm=CLIP)
    return steps, weights


class Language(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: GPTModel | None = None
        self.norm = 0.0
        self.steps: list[tuple[float, float]] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(CONFIG, seed=5)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(batch[0], labels=batch[1])
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        # Before it is clipped.
        self.norm = float(grad_norm(self)["grad_2.0_norm_total"])

    def on_train_batch_end(self, *_: object) -> None:
        self.steps.append((float(self.trainer.callback_metrics["loss"]), self.norm))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train_by_package() -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    module = Language()
    trainer = make_trainer(LAYOUT, max_epochs=1, gradient_clip_val=CLIP)
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    assert module.model is not None
    return module.steps, {name: value.detach() for name, value in module.model.named_parameters()}


def test_the_tour_trains_as_the_package_does() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        whole = dict(GPTModel(CONFIG, seed=5).state_dict())
    finally:
        torch.set_default_dtype(torch.float32)
    by_tour = run_on_ranks(4, train_by_tour, whole)
    by_package = run_on_ranks(4, train_by_package, init=False)
    for (steps, weights), (wanted_steps, wanted) in zip(by_tour, by_package, strict=True):
        for step, wanted_step in zip(steps, wanted_steps, strict=True):
            assert step == pytest.approx(wanted_step, rel=TOLERANCE)
        common = weights.keys() & wanted.keys()
        # Both layers of the stage are there; the tied embedding has another name on the last stage.
        assert len(common) >= 24
        for name in common:
            torch.testing.assert_close(weights[name], wanted[name], rtol=0, atol=TOLERANCE, msg=name)
    losses, norms = zip(*by_tour[0][0], strict=True)
    assert abs(losses[0] - losses[-1]) > 1e6 * TOLERANCE
    # It clips.
    assert all(norm > CLIP for norm in norms)
