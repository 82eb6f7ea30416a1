"""Shards of the optimizer, and sums while backward runs, change no number of a fit, whatever the user's code does."""

import dataclasses
import gc
import weakref
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional

from lightning_megatron import ConfigurationError, MegatronStrategy
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.muon import Muon, muon_groups
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import diagonal, every_nth
from tests.trainer.fits import weights
from tests.trainer.layouts import PLAIN, Layout, make_trainer
from tests.trainer.lightning_api.test_callbacks import TrainsTheRest, Unfreezes, averages, finds_rate, rates
from tests.trainer.lightning_api.test_ledger import Case, Ledger, Record, discrepancies, fit, record
from tests.trainer.lightning_api.test_optimizers import (
    OPTIMIZERS,
    Adversaries,
    Groups,
    ManualAccumulation,
    ManualClosure,
    ManualTorch,
    Newton,
    OwnStep,
    TorchStep,
    With,
    ZeroesSeldom,
)
from tests.trainer.modules import Data, Parallel, Scheduled, Small

ZERO = OptimizerConfig(kind="distributed", bucket_size=60)
LAYOUTS = {
    "distributed": Layout(world=2, optimizer=ZERO),
    "distributed, overlapping": Layout(
        world=2, optimizer=dataclasses.replace(ZERO, overlap_grad_reduce=True, overlap_param_gather=True)
    ),
    "replicated, overlapping": Layout(world=2, optimizer=OptimizerConfig(overlap_grad_reduce=True, bucket_size=60)),
    "distributed, stages": Layout(world=4, pp=2, microbatches=2, optimizer=ZERO),
}


def twice(layout: Layout, _: Path) -> Record:
    """One module, two fits, each followed by a validation and a test."""
    module, found = Small(), {}
    for number in range(2):
        ledger = Ledger()
        trainer = make_trainer(layout, max_epochs=1, callbacks=[ledger])
        trainer.fit(module, Data())
        found[f"val {number}"] = trainer.validate(module, Data(), verbose=False)
        found[f"test {number}"] = trainer.test(module, Data(), verbose=False)
        found[f"told {number}"] = record(trainer, ledger)
        found[f"left {number} weights"] = weights(module)
    return found


class ClipsByTorch(Small):
    """Reads gradients, scales them all by torch, puts others in their place and drops one."""

    def on_after_backward(self) -> None:
        self.log_dict(grad_norm(self, norm_type=2))
        nn.utils.clip_grad_norm_(self.parameters(), 0.2)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad * 0.5
        if self.trainer.global_step == 2:
            self.before.weight.grad = None

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        nn.utils.clip_grad_value_(self.parameters(), 0.01)


class ManualClipping(Small):
    """Adds up two batches by hand and clips by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(functional.cross_entropy(self.logits(batch[0]), batch[1]))
        if batch_idx % 2:
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


CASES: dict[str, Case] = {
    "hooks of its own": lambda layout, _: fit(layout, OwnStep()),
    "clipped in hooks": lambda layout, _: fit(layout, ClipsByTorch()),
    "clipped by hand": lambda layout, _: fit(layout, ManualClipping()),
    "torch's optimizer": lambda layout, _: fit(layout, TorchStep()),
    "torch's optimizer, by hand": lambda layout, _: fit(layout, ManualTorch()),
    "two optimizers, toggled": lambda layout, _: fit(layout, Adversaries()),
    "accumulation by hand": lambda layout, _: fit(layout, ManualAccumulation()),
    "a closure": lambda layout, _: fit(layout, ManualClosure()),
    "gradients kept from batch to batch": lambda layout, _: fit(layout, ZeroesSeldom()),
    "accumulating": lambda layout, _: fit(layout, Scheduled(), accumulate_grad_batches=3),
    "clipped by value": lambda layout, _: fit(
        layout, gradient_clip_val=1e-2, gradient_clip_algorithm="value", max_epochs=1
    ),
    "clipped": lambda layout, _: fit(layout, gradient_clip_val=0.1),
    "groups": lambda layout, _: fit(layout, Groups()),
    "Adafactor": lambda layout, _: fit(layout, With("Adafactor", **OPTIMIZERS["Adafactor"])),
    "rates": rates,
    "two fits": twice,
    "a search for the rate": finds_rate,
    "moving average": lambda layout, _: averages(layout, EMAWeightAveraging(decay=0.7), Small(), max_epochs=3),
}


def names_for(layout: str) -> list[str]:
    without: set[str] = set()
    if LAYOUTS[layout].optimizer.overlap_param_gather:
        without.add("moving average")
    if LAYOUTS[layout].pp > 1:
        # Stages take manual optimization in the collective mode alone, and others of these at a cost of minutes.
        without |= set(CASES) - {"accumulating", "clipped by value", "groups", "two fits", "moving average"}
    return [name for name in CASES if name not in without]


CELLS = diagonal([(layout, case) for layout in LAYOUTS for case in names_for(layout)])


@pytest.mark.matrix
@pytest.mark.parametrize(("layout", "case"), CELLS)
def test_a_fit_records_what_it_records_on_one_device(layout: str, case: str) -> None:
    names = [name for chosen, name in CELLS if chosen == layout]
    assert discrepancies(__name__, names, LAYOUTS[layout], case, list(CASES)) == []


def norms_before_clipping(layout: Layout) -> list[float]:
    norms: list[float] = []

    class Norms(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
            norm = trainer.strategy.gradient_norm if isinstance(trainer.strategy, MegatronStrategy) else module.norm
            norms.append(float(norm))

    class Measures(Small):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])

    make_trainer(layout, callbacks=[Norms()], gradient_clip_val=0.1, limit_val_batches=0).fit(Measures(), Data())
    return norms


@pytest.mark.parametrize("name", every_nth(LAYOUTS, 2))
def test_the_norm_before_clipping_is_that_of_one_device(name: str) -> None:
    layout = LAYOUTS[name]
    [wanted] = run_on_ranks(1, norms_before_clipping, PLAIN, init=False)
    assert len(wanted) == 8 and min(wanted) > 0.1
    for found in run_on_ranks(layout.world, norms_before_clipping, layout, init=False):
        assert found == pytest.approx(wanted, abs=1e-11)


# --- overlap ----------------------------------------------------------------------------------------------------------


def bits(config: OptimizerConfig) -> dict[str, Tensor]:
    module = Small()
    make_trainer(Layout(world=2, optimizer=config), limit_val_batches=0).fit(module, Data())
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def with_and_without_overlap() -> list[bool]:
    same = []
    for kind in ("replicated", "distributed"):
        plain = OptimizerConfig(kind=kind, bucket_size=60)  # type: ignore[arg-type]
        wanted = bits(plain)
        options = [{"overlap_grad_reduce": True}]
        if kind == "distributed":
            options += [{"overlap_param_gather": True}, {"overlap_grad_reduce": True, "overlap_param_gather": True}]
        for option in options:
            found = bits(dataclasses.replace(plain, **option))
            same.append(all(torch.equal(found[name], wanted[name]) for name in wanted))
    return same


def test_overlap_changes_no_bit() -> None:
    assert run_on_ranks(2, with_and_without_overlap, init=False) == [[True] * 4] * 2


# --- what is left of it -----------------------------------------------------------------------------------------------


class Single(Scheduled):
    """Takes its inputs in float32."""

    def logits(self, inputs: Tensor) -> Tensor:
        return super().logits(inputs.float())


def dtypes_of(layout: Layout, grad_dtype: Any) -> list[Any]:
    """While and after a fit in bfloat16, and how a fit in float32 follows it."""
    module, seen = Single(), set()

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
            seen.update((p.dim() > 1, str(p.dtype)) for p in module.parameters())

    config = dataclasses.replace(layout.optimizer, grad_dtype=grad_dtype)
    one = make_trainer(dataclasses.replace(layout, optimizer=config), precision="bf16-mixed", callbacks=[Looks()])
    one.fit(module, Data())
    found = [seen, {(str(p.dtype), str(p.grad_dtype)) for p in module.parameters()}]
    before = weights(module)
    one.validate(module, Data(), verbose=False)
    make_trainer(dataclasses.replace(layout, optimizer=OptimizerConfig()), precision="32-true").fit(module, Data())
    moved = max(float((weights(module)[n][1] - before[n][1]).abs().max()) for n in before)
    return [*found, moved > 0.01, all(p.grad is None or p.grad.dtype == torch.float32 for p in module.parameters())]


@pytest.mark.parametrize("grad_dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("name", ["distributed", "replicated, overlapping"])
def test_after_a_mixed_fit_weights_are_in_float32_and_another_fit_may_follow(name: str, grad_dtype: str) -> None:
    for during, after, is_trained, is_narrow in run_on_ranks(2, dtypes_of, LAYOUTS[name], grad_dtype, init=False):
        assert during == {(True, "torch.bfloat16"), (False, "torch.float32")}
        assert after == {("torch.float32", "torch.float32")}
        assert is_trained and is_narrow


def forgets() -> bool:
    """Whether the gradients of a fit are gone with its Trainer, though the module stays."""
    module = Parallel()
    trainer = make_trainer(Layout(optimizer=ZERO), max_epochs=1)
    found: list[Any] = []

    class Looks(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            found.append(weakref.ref(trainer.strategy._dp_comm))

    trainer.callbacks.append(Looks())  # type: ignore[attr-defined]
    trainer.fit(module, Data())
    del trainer
    gc.collect()
    return found[0]() is None and module.net is not None


def test_a_module_does_not_keep_the_gradients_of_its_last_fit() -> None:
    assert run_on_ranks(1, forgets, init=False) == [True]


# --- what is refused --------------------------------------------------------------------------------------------------


class AddsLater(Small):
    """Gives a layer to the optimizer in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": list(self.before.parameters())})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.net.parameters(), *self.after.parameters()], lr=0.1)


def refusal(module: L.LightningModule, layout: Layout, **options: Any) -> str:
    try:
        make_trainer(layout, limit_val_batches=0, **options).fit(module, Data())
    except (ConfigurationError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


class StepsMatrices(Small):
    """Steps by an optimizer of whole matrices."""

    def configure_optimizers(self) -> Any:
        return Muon(muon_groups(self.named_parameters(), weight_decay=0.1))


def refusals() -> dict[str, str]:
    zero, gathering = Layout(optimizer=ZERO), LAYOUTS["distributed, overlapping"].optimizer
    return {
        "newton": refusal(Newton(), zero),
        "newton, mixed": refusal(Newton(), Layout(), precision="bf16-mixed"),
        "added": refusal(AddsLater(), zero),
        "thawed": refusal(TrainsTheRest(), zero, callbacks=[Unfreezes()]),
        "averaged": refusal(Small(), Layout(optimizer=gathering), callbacks=[EMAWeightAveraging(decay=0.7)]),
        "muon on the host": refusal(StepsMatrices(), Layout(optimizer=OptimizerConfig(cpu_offload=True))),
    }


def test_what_master_weights_cannot_do_is_refused_with_a_way_out() -> None:
    [found] = run_on_ranks(1, refusals, init=False)
    for name, message in {
        "newton": "LBFGS runs forwards within its step",
        "newton, mixed": "LBFGS runs forwards within its step",
        "added": "RuntimeError: param group 1 of SGD got a parameter after training began",
        "thawed": "Unfreezes looks for the model's parameters in the optimizer",
        "muon on the host": "Muon multiplies matrices in its step, which cpu_offload would have done on the host",
        "averaged": "EMAWeightAveraging reads weights between a step and the next forward",
    }.items():
        assert message in found[name]
    assert 'use precision 32-true or bf16-true with OptimizerConfig(kind="replicated")' in found["thawed"]
