"""Muon under the Trainer: models that nobody wrote for it, runs that go on elsewhere, and what is refused."""

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_megatron.lightning_modules import AdamWConfig
from lightning_megatron.lightning_modules.adamw import adamw_with_warmup
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.muon import Muon, muon_groups
from lightning_megatron.testing import certify
from tests.any_module.model_families import Causal, batches
from tests.harness.ranks import run_on_ranks
from tests.trainer.fits import Parts, parts_apart, weights
from tests.trainer.layouts import QUIET, Layout, make_trainer

pytestmark = pytest.mark.filterwarnings(QUIET)


class CausalMuon(Causal):
    """A model of transformers as it is."""

    def configure_optimizers(self) -> Any:
        return Muon(muon_groups(self.named_parameters(), weight_decay=0.1), lr=0.01, adamw_eps=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model_type", "layouts"),
    [
        ("llama", ("tp2-sp", "dp2pp2tp2-zero")),
        # Gate and up are blocks of one weight; experts are stacks of matrices.
        ("phi3", ("tp2", "dp2-zero")),
        ("qwen3_moe", ("ep2", "pp2")),
    ],
)
def test_an_unchanged_model_steps_as_on_one_device(model_type: str, layouts: tuple[str, ...]) -> None:
    certify(functools.partial(CausalMuon, model_type), batches, layouts=layouts, steps=2).assert_equal()


MODEL = GPTConfig(
    num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=32, max_sequence_length=8, activation="swiglu"
)


class Model(L.LightningModule):
    """A GPT with Muon, and its data."""

    def __init__(self, num_replicas: int = 1) -> None:
        super().__init__()
        self.num_replicas = num_replicas
        self.model: GPTModel | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(MODEL)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(**batch)
        return loss

    def configure_optimizers(self) -> Any:
        return adamw_with_warmup(self, AdamWConfig(lr=0.02, warmup_steps=1, matrix_optimizer="muon", total_steps=6))

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(32, (24, 9), generator=generator)
        rows = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
        return torch.utils.data.DataLoader(rows, batch_size=8 // self.num_replicas)  # type: ignore[arg-type]


def trained(layout: Layout, folder: Path, steps: int, start: Path | None = None) -> Parts:
    """The weights after so many steps in all, and a checkpoint of them."""
    L.seed_everything(7, verbose=False)
    # Of three steps each.
    trainer = make_trainer(layout, max_epochs=steps // 3, default_root_dir=folder, use_distributed_sampler=True)
    module = Model(layout.dp)
    trainer.fit(module, ckpt_path=None if start is None else str(start))
    [optimizer] = trainer.optimizers
    assert type(optimizer) is Muon
    buffers = [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
    assert all(one.shape == two.shape for one, two in zip(buffers, optimizer.param_groups[0]["params"], strict=True))
    if start is None:
        trainer.save_checkpoint(folder / f"{steps}.ckpt")
    return weights(module)


@pytest.mark.parametrize(
    "to",
    [Layout(), Layout(world=2, pp=2, microbatches=2), Layout(world=2, optimizer=OptimizerConfig(kind="distributed"))],
)
def test_a_run_goes_on_under_another_layout(to: Layout, tmp_path: Path) -> None:
    origin = Layout(world=2, tp=2, sp=True)
    [whole] = run_on_ranks(1, trained, Layout(), tmp_path, 6, init=False)
    run_on_ranks(2, trained, origin, tmp_path, 3, init=False)
    for parts in run_on_ranks(to.world, resumed, to, tmp_path, init=False):
        assert parts_apart(parts, whole) < 1e-9


def resumed(layout: Layout, folder: Path) -> Parts:
    return trained(layout, folder, 6, folder / "3.ckpt")


def test_a_ready_module_takes_it_by_a_setting() -> None:
    module = Model()
    module.configure_model()
    module.trainer = make_trainer(Layout(is_plain=True), max_steps=4)
    optimizer = module.configure_optimizers()["optimizer"]
    names = {parameter: name for name, parameter in module.named_parameters()}
    assert isinstance(optimizer, Muon)
    matrices = {names[one].rpartition("layers.")[2] for one in optimizer.param_groups[0]["params"]}
    assert matrices == {
        f"{layer}.{name}.weight"
        for layer in range(2)
        for name in ("attention.qkv", "attention.projection", "mlp.up", "mlp.down")
    }
