"""Every precision that is offered trains on cut and staged models as it does on one device; others are refused."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.optim.separable import needs_closure
from lightning_megatron.trainer.precision import MegatronPrecision
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small, Weighted

CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    max_sequence_length=8,
    vocab_size=61,
    init_std=0.2,
)
LAYOUTS = {
    "one": Layout(),
    "tp2+sp": Layout(world=2, tp=2, sp=True),
    "pp2": Layout(world=2, pp=2, microbatches=2),
}
# A bfloat16 keeps 8 bits: sums in another order differ by up to 2^-8 of their terms, and six steps add up.
TOLERANCE = {"64-true": 1e-11, "32-true": 1e-5, "bf16-mixed": 0.03, "bf16-true": 0.06}
DTYPES = {
    "64-true": torch.float64,
    "32-true": torch.float32,
    "bf16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
}


class Language(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: GPTModel | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(CONFIG, seed=2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(batch[0], labels=batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


def loader() -> Any:
    tokens = torch.randint(0, 61, (8, 9), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4)


def trained(layout: Layout) -> dict[str, tuple[list[float], set[torch.dtype], str]]:
    found = {}
    for precision in DTYPES:
        module = Language()
        trainer = make_trainer(layout, precision=precision, max_epochs=3, gradient_clip_val=1.0)
        trainer.fit(module, loader())
        parameters = list(module.parameters())
        dtypes = {p.dtype for p in parameters} | {p.grad.dtype for p in parameters if p.grad is not None}
        found[precision] = (module.losses, dtypes, str(trainer.precision))
    return found


@pytest.fixture(scope="module")
def on_one() -> dict[str, Any]:
    [found] = run_on_ranks(1, trained, LAYOUTS["one"], init=False)
    return found


@pytest.mark.parametrize("name", ["tp2+sp", "pp2"])
def test_a_precision_trains_as_on_one_device(name: str, on_one: dict[str, Any]) -> None:
    for found in run_on_ranks(2, trained, LAYOUTS[name], init=False):
        for precision, tolerance in TOLERANCE.items():
            losses, dtypes, shown = found[precision]
            assert shown == precision and dtypes == {DTYPES[precision]}
            assert losses == pytest.approx(on_one[precision][0], abs=tolerance)
            # It learns: what it read twice it knows better by much more than the tolerance.
            assert losses[0] - losses[-2] > 4 * tolerance


def test_precisions_differ_where_they_should(on_one: dict[str, Any]) -> None:
    exact, mixed = on_one["32-true"][0], on_one["bf16-mixed"][0]
    assert on_one["64-true"][0] == pytest.approx(exact, abs=1e-4)
    assert exact != mixed


@pytest.mark.parametrize("precision", ["16-true", "transformer-engine"])
def test_a_precision_that_is_not_offered_is_refused_with_the_list(precision: str) -> None:
    with pytest.raises((ValueError, ModuleNotFoundError)) as error:
        L.Trainer(accelerator="cpu", strategy=MegatronStrategy(), precision=precision, logger=False)  # type: ignore[arg-type]
    if isinstance(error.value, ValueError):
        assert "use one of 64-true, 32-true, bf16-true, bf16-mixed" in str(error.value)


class Hooked(Small):
    """Notes what a hook of the optimizer's step finds, and leaves the weights to LBFGS where asked."""

    def __init__(self, uses_lbfgs: bool) -> None:
        super().__init__()
        self.uses_lbfgs = uses_lbfgs
        self.found: list[bool] = []

    def configure_optimizers(self) -> Any:
        if self.uses_lbfgs:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: self.found.append(self.before.weight.grad is not None))
        return optimizer


def hooked(uses_lbfgs: bool) -> tuple[list[bool], bool]:
    module = Hooked(uses_lbfgs)
    before = module.after.weight.detach().clone()
    make_trainer(Layout(), max_epochs=1, limit_val_batches=0).fit(module, Data(24))
    return module.found, torch.equal(before, module.after.weight.detach().to(before.dtype))


def test_step_hooks_of_the_optimizer_see_gradients() -> None:
    [(found, is_same)] = run_on_ranks(1, hooked, False, init=False)
    assert found and all(found) and not is_same


def test_an_optimizer_that_runs_the_closure_by_itself_trains() -> None:
    [(_, is_same)] = run_on_ranks(1, hooked, True, init=False)
    assert not is_same


class AsksForClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


def test_an_optimizer_that_must_have_the_closure_is_known_by_its_signature() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1))]
    assert needs_closure(AsksForClosure(weights)) and needs_closure(torch.optim.LBFGS(weights))
    assert not needs_closure(torch.optim.AdamW(weights))


class WeightedInHalf(Weighted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        # Sums of weights that are no powers of two: dividing by those rounds nothing.
        return super().training_step((batch[0], batch[1], batch[2] + 0.3), batch_idx)

    def logits(self, inputs: Tensor) -> Tensor:
        return super().logits(inputs.to(self.before.bias.dtype))


class Notes(L.Callback):
    """The weights and the loss scale's state after each step, by its number."""

    def __init__(self) -> None:
        self.after: dict[int, tuple[dict[str, Any], dict[str, Tensor]]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        plugin = trainer.precision_plugin
        assert isinstance(plugin, MegatronPrecision) and plugin.loss_scale is not None
        weights = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.after[trainer.global_step] = plugin.loss_scale.state_dict(), weights


def in_half(folder: Path, layout: Layout) -> tuple[dict[int, Any], dict[int, Any]]:
    """What a run noted in its second epoch, and what one noted that went on from the first one's checkpoint."""
    noted = []
    for epochs, resumes in ((2, False), (1, False), (2, True)):
        notes, path = Notes(), folder / "1.ckpt"
        plugins = [MixedPrecision("16-mixed", "cpu")]
        options = {"plugins": plugins, "precision": None, "callbacks": [notes], "limit_val_batches": 0}
        trainer = make_trainer(layout, max_epochs=epochs, **options)
        trainer.fit(WeightedInHalf(), Data(40), ckpt_path=path if resumes else None)
        if epochs == 1:
            trainer.save_checkpoint(path)
        noted.append(notes.after)
    full, _, resumed = noted
    return {step: full[step] for step in full if step > 5}, resumed


@pytest.mark.parametrize("layout", [Layout(microbatches=2), Layout(world=2, pp=2, microbatches=2)])
def test_in_float16_a_resumed_run_goes_on_bit_by_bit(layout: Layout, tmp_path: Path) -> None:
    for wanted, found in run_on_ranks(layout.world, in_half, tmp_path, layout, init=False):
        assert list(found) == list(wanted) == [6, 7, 8, 9, 10]
        for step, (state, weights) in found.items():
            assert state == wanted[step][0] and state["usual_weight"] > 1
            assert all(torch.equal(weight, wanted[step][1][name]) for name, weight in weights.items()), step
