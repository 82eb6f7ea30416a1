"""Evaluation says the same under every layout, and callbacks that follow it decide the same."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn

from lightning_megatron.lightning_modules import AdamWConfig, GPTModule
from lightning_megatron.metrics.token_means import Perplexity, TokenMean
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.lightning_modules.corpus import config, data
from tests.trainer.layouts import PLAIN, QUIET, Layout, make_trainer

pytestmark = pytest.mark.filterwarnings(QUIET)

SIZES: dict[str, Any] = {"num_layers": 4, "label_smoothing": 0.2}
MOE = MoEConfig(router=RouterConfig(num_experts=4, top_k=2), ffn_hidden_size=24)
LAYOUTS = {
    "tp2 sp": Layout(world=2, tp=2, sp=True),
    "pp2 vp2": Layout(world=2, pp=2, vp=2, microbatches=2),
    "cp2": Layout(world=2, cp=2),
    "dp2": Layout(world=2),
    "pp2 dp2": Layout(world=4, pp=2, microbatches=2),
    "ep2": Layout(world=2, ep=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("evaluation")
    data(path).setup("fit")
    return path


def evaluated(layout: Layout, folder: Path, has_experts: bool) -> dict[str, float]:
    torch.manual_seed(7)
    module = GPTModule(config(**SIZES, moe=MOE if has_experts else None))
    trainer = make_trainer(layout)
    # Rows hold documents, end in padding, and do not fill the last batch.
    text = data(folder, packing="documents", global_batch_size=4)
    return trainer.validate(module, datamodule=text, verbose=False)[0] | trainer.test(module, text, verbose=False)[0]


@functools.cache
def on_one_device(folder: Path, has_experts: bool) -> dict[str, float]:
    return evaluated(PLAIN, folder, has_experts)


def test_perplexity_and_accuracy_are_those_of_plain_torch_on_unsharded_logits(folder: Path) -> None:
    torch.manual_seed(7)
    module, text = GPTModule(config(**SIZES)), data(folder, packing="documents")
    trainer = make_trainer(PLAIN)
    [logged] = trainer.validate(module, datamodule=text, verbose=False)
    assert module.model is not None
    samples = text._held_out
    assert samples is not None and samples.count % 4
    losses, correct, weight, smoothed = 0.0, 0.0, 0.0, 0.0
    with torch.no_grad():
        for i in range(samples.count):
            sample = {name: value[None] for name, value in samples.dataset[i].items()}
            logits = module.model.eval()(sample["tokens"], segments=sample["segments"])[0]
            labels, mask = sample["labels"][0], sample["loss_mask"][0].double()
            mask = torch.where(labels == -100, 0.0, mask)
            losses += float((nn.functional.cross_entropy(logits, labels, reduction="none") * mask).sum())
            of_smoothed = nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=0.2)
            smoothed += float((of_smoothed * mask).sum())
            correct += float(((logits.argmax(-1) == labels) * mask).sum())
            weight += float(mask.sum())
    wanted = {"val_loss": smoothed, "val_perplexity": losses, "val_accuracy": correct}
    wanted = {name: total / weight for name, total in wanted.items()}
    wanted["val_perplexity"] = torch.tensor(wanted["val_perplexity"], dtype=torch.float64).exp().item()
    assert logged == pytest.approx(wanted, rel=1e-9) and correct > 0
    assert logged["val_perplexity"] != pytest.approx(torch.tensor(logged["val_loss"]).exp().item(), rel=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "has_experts"),
    # On dp2 each dp rank would have all experts, as on one device.
    [(name, has) for name in LAYOUTS for has in (False, True) if (name, has) not in {("dp2", True), ("ep2", False)}],
)
def test_every_mean_is_that_of_one_device(name: str, has_experts: bool, folder: Path) -> None:
    layout, wanted = LAYOUTS[name], on_one_device(folder, has_experts)
    assert len(wanted) == 6
    for found in run_on_ranks(layout.world, evaluated, layout, folder, has_experts, init=False):
        assert found == pytest.approx(wanted, rel=1e-9)


# --- callbacks --------------------------------------------------------------------------------------------------------


def followed(layout: Layout, folder: Path, target: Path, ckpt_path: str | None = None) -> dict[str, Any]:
    """A run whose rate is so high that its validation gets worse soon, and what followed it."""
    torch.manual_seed(7)
    module = GPTModule(config(**SIZES), AdamWConfig(lr=0.1, warmup_steps=20, total_steps=40))
    best = ModelCheckpoint(target, filename="best-{step}", monitor="val_loss", save_top_k=1)
    exact = ModelCheckpoint(target, filename="exact-{step}", monitor="val_accuracy", mode="max", save_top_k=1)
    stopping = EarlyStopping("val_perplexity", patience=2)
    trainer = make_trainer(
        layout,
        max_steps=40,
        max_epochs=-1,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        enable_checkpointing=True,
        callbacks=[best, exact, stopping],
    )
    trainer.fit(module, datamodule=data(folder), ckpt_path=ckpt_path)
    assert stopping.best_score is not None and best.best_model_score is not None
    return {
        "stopped": trainer.global_step,
        "best": Path(best.best_model_path).name,
        "exact": Path(exact.best_model_path).name,
        "best loss": best.best_model_score.item(),
        "best perplexity": stopping.best_score.item(),
        "last": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


@functools.cache
def followed_on_one_device(folder: Path) -> dict[str, Any]:
    return followed(PLAIN, folder, folder / "plain")


@pytest.mark.matrix
@pytest.mark.parametrize("name", every_nth(["pp2 vp2", "dp2"], 2))
def test_checkpoints_and_early_stopping_follow_the_means(name: str, folder: Path, tmp_path: Path) -> None:
    wanted = followed_on_one_device(folder)
    assert 6 < wanted["stopped"] < 40, "it gets worse and is stopped"
    layout = LAYOUTS[name]
    for found in run_on_ranks(layout.world, followed, layout, folder, tmp_path / "cut", init=False, timeout=120):
        assert {key: found[key] for key in ("stopped", "best", "exact")} == {
            key: wanted[key] for key in ("stopped", "best", "exact")
        }
        assert found["best loss"] == pytest.approx(wanted["best loss"], rel=1e-6)
        assert found["best perplexity"] == pytest.approx(wanted["best perplexity"], rel=1e-6)
    # And a run that goes on from the best one, on one device, ends as the first did.
    path = str(tmp_path / "cut" / wanted["best"])
    [resumed] = run_on_ranks(1, followed, Layout(), folder, tmp_path / "cut", path, init=False, timeout=120)
    assert resumed["last"] == pytest.approx(wanted["last"], rel=1e-5)


# --- the metrics ------------------------------------------------------------------------------------------------------


def test_means_divide_once_and_forget_on_reset() -> None:
    mean, perplexity = TokenMean(), Perplexity()
    for metric in (mean, perplexity):
        metric.update(torch.tensor(3.0), torch.tensor(1.0, dtype=torch.float64))
        metric.update(torch.tensor(0.0), torch.tensor(0.0))
        metric.update(torch.tensor(1.0), torch.tensor(3.0))
    assert mean.compute().item() == 1.0
    assert perplexity.compute().item() == pytest.approx(2.718281828459045)
    mean.reset()
    mean.update(torch.tensor(0.0), torch.tensor(0.0))
    assert mean.compute().isnan(), "nothing counted"
    assert mean.half().total.dtype == torch.float64 and mean.state_dict() == {}


def test_many_batches_are_added_up_exactly() -> None:
    mean = TokenMean()
    mean.update(torch.tensor(2.0**30, dtype=torch.float64), torch.tensor(2.0**30, dtype=torch.float64))
    for _ in range(10):
        mean.update(torch.tensor(0.0), torch.tensor(1.0))
    assert mean.compute().item() == 2.0**30 / (2.0**30 + 10)
