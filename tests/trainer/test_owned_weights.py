"""torch's optimizers of whole matrices under the Trainer, where ranks hold parts, and runs that go on elsewhere."""

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_megatron import ConfigurationError, OptimizerConfig
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from lightning_megatron.testing import certify
from tests.any_module.model_families import Causal, batches
from tests.harness.ranks import run_on_ranks
from tests.trainer.fits import Parts, parts_apart, weights
from tests.trainer.layouts import QUIET, Layout, make_trainer

pytestmark = pytest.mark.filterwarnings(QUIET)

ZERO = OptimizerConfig(kind="distributed")
# A vocabulary that tp pads.
MODEL = GPTConfig(
    num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=31, max_sequence_length=8, activation="swiglu"
)
EXPERTS = GPTConfig(**{**vars(MODEL), "moe": MoEConfig(router=RouterConfig(num_experts=4, top_k=2))})


class Factored(L.LightningModule):
    """A GPT with Adafactor, and its data."""

    def __init__(self, config: GPTConfig = MODEL, num_replicas: int = 1) -> None:
        super().__init__()
        self.config, self.num_replicas = config, num_replicas
        self.model: GPTModel | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(self.config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(**batch)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.05, eps=(1e-3, 1e-3))

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(31, (24, 9), generator=generator)
        rows = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
        return torch.utils.data.DataLoader(rows, batch_size=8 // self.num_replicas)  # type: ignore[arg-type]


class CausalFactored(Causal):
    """A model of transformers as it is, with Adafactor."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.05, eps=(1e-3, 1e-3))


class CausalOrthogonal(Causal):
    """A model of transformers as it is, with torch's Muon for its matrices."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([one for one in self.parameters() if one.dim() == 2], lr=0.01)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("make", "layouts"),
    [
        (functools.partial(CausalFactored, "llama"), ("tp2-sp", "dp2tp2-zero", "pp2", "dp2pp2tp2-zero3")),
        (functools.partial(CausalFactored, "qwen3_moe"), ("ep2", "tp2", "ep2-zero")),
        (functools.partial(CausalOrthogonal, "llama"), ("tp2", "dp2tp2-zero2")),
    ],
)
def test_an_unchanged_model_steps_as_on_one_device(make: Any, layouts: tuple[str, ...]) -> None:
    certify(make, batches, layouts=layouts, steps=3).assert_equal()


def trained(layout: Layout, folder: Path, steps: int, config: GPTConfig, start: str) -> Parts:
    """The weights after so many steps in all, and a checkpoint of them."""
    L.seed_everything(7, verbose=False)
    # Of three steps each.
    trainer = make_trainer(layout, max_epochs=steps // 3, default_root_dir=folder, use_distributed_sampler=True)
    module = Factored(config, layout.dp)
    trainer.fit(module, ckpt_path=str(folder / start) if start else None)
    if not start:
        trainer.save_checkpoint(folder / f"{steps}.ckpt")
    return weights(module)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("origin", "to", "config"),
    [
        (Layout(world=2, tp=2, sp=True), Layout(), MODEL),
        (Layout(), Layout(world=4, tp=2, optimizer=ZERO), MODEL),
        (Layout(world=4, tp=2, optimizer=ZERO), Layout(world=2, pp=2, microbatches=2), MODEL),
        (Layout(world=2, ep=2), Layout(world=2, tp=2), EXPERTS),
    ],
)
def test_a_run_goes_on_under_another_layout(origin: Layout, to: Layout, config: GPTConfig, tmp_path: Path) -> None:
    [whole] = run_on_ranks(1, trained, Layout(), tmp_path, 6, config, "", init=False)
    run_on_ranks(origin.world, trained, origin, tmp_path, 3, config, "", init=False)
    for parts in run_on_ranks(to.world, trained, to, tmp_path, 6, config, "3.ckpt", init=False):
        assert parts_apart(parts, whole) < 1e-9
    # It would show: without its states the optimizer goes elsewhere.
    [fresh] = run_on_ranks(1, trained_anew, tmp_path, config, init=False)
    assert parts_apart(fresh, whole) > 1e-4


def trained_anew(folder: Path, config: GPTConfig) -> Parts:
    class Forgets(Factored):
        def on_train_start(self) -> None:
            self.trainer.optimizers[0].state.clear()

    module = Forgets(config, 1)
    trainer = make_trainer(Layout(), max_epochs=2, default_root_dir=folder, use_distributed_sampler=True)
    trainer.fit(module, ckpt_path=str(folder / "3.ckpt"))
    return weights(module)


class KeepsEarly(torch.optim.Adafactor):
    """Makes a state before its first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["before"] = torch.zeros_like(parameter)


def refused(optimizer: Any, config: OptimizerConfig) -> str:
    class Other(Factored):
        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters())

    layout = Layout(world=2, tp=2, optimizer=config)
    with pytest.raises(ConfigurationError) as error:
        make_trainer(layout, max_steps=1).fit(Other())
    return str(error.value)


def both_refused() -> tuple[str, str]:
    return refused(KeepsEarly, OptimizerConfig()), refused(torch.optim.Adafactor, OptimizerConfig(cpu_offload=True))


def test_states_of_parts_and_steps_on_the_host_are_refused() -> None:
    for early, offloaded in run_on_ranks(2, both_refused, init=False):
        assert "KeepsEarly reads whole weights, and has made states of the parts" in early
        assert "Adafactor reads whole weights, of which ranks send parts" in offloaded
