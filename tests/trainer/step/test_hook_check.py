"""Hooks that do different things to the model on different ranks end the run; what all do alike goes on."""

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn

from lightning_megatron import clip_grad_norm_, weight_norm
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.trainer.step import hook_check
from tests.harness.ranks import RankFailed, run_on_ranks
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small

DP2, TP2, PP2 = Layout(world=2), Layout(world=2, tp=2), Layout(world=2, pp=2, microbatches=2)
ZERO = Layout(world=2, optimizer=OptimizerConfig(kind="distributed"))
HOOK = "Clips.on_before_optimizer_step changed the gradients of step 0 "


class Clips(Small):
    """Changes its gradients in a hook, in the way that `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        match self.how:
            case "by its own norm":
                nn.utils.clip_grad_norm_(self.parameters(), 0.01)
            case "its chain by its own norm":
                nn.utils.clip_grad_norm_(self.net.parameters(), 0.001)
            case "by the model's norm":
                clip_grad_norm_(self, 0.01)
            case "by value":
                nn.utils.clip_grad_value_(self.parameters(), 0.001)
            case "halved":
                torch._foreach_mul_(gradients, 0.5)
            case "with noise":
                for gradient in gradients:
                    gradient.add_(
                        torch.randn(gradient.shape, generator=torch.Generator().manual_seed(self.global_rank))
                    )
            case "its chain halved on the last rank":
                torch._foreach_mul_([p.grad for p in self.net.parameters()], 0.5 if self.global_rank else 1.0)


class ClipsBeforeSteps(Small):
    """Clips by its own norm in a hook of its optimizer's."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(self.clip)
        return optimizer

    def clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nn.utils.clip_grad_norm_([weight for group in optimizer.param_groups for weight in group["params"]], 0.01)


class ClipsLate(Clips):
    """Clips from the fourth step on, when copies of weights are not compared any more."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step > 2:
            super().on_before_optimizer_step(optimizer)


class OneWeight(L.LightningModule):
    """Has a weight that one rank steps, and halves the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4, bias=False, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": nn.functional.cross_entropy(self.layer(batch[0][:, :1]), batch[1]), "loss_reduction": "mean"}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.layer.weight.grad is not None:
            self.layer.weight.grad.mul_(0.5)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Projects(Small):
    """Changes its weights after each step, in the way that `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        weights = list(self.parameters())
        match self.how.removeprefix("weights "):
            case "each onto a ball":
                for weight in weights:
                    weight.mul_(0.5 / weight.norm())
            case "all onto a ball":
                torch._foreach_mul_(weights, float(0.5 / torch.stack([w.norm() for w in weights]).norm()))
            case "onto a ball by the model's norm":
                torch._foreach_mul_(weights, float(0.5 / weight_norm(self)["weight_2.0_norm_total"]))
            case "within bounds":
                for weight in weights:
                    weight.data.clamp_(-0.05, 0.05)
            case "halved":
                torch._foreach_mul_(weights, 0.5)


KINDS: dict[str, Callable[[], L.LightningModule]] = {
    "one weight": OneWeight,
    "before steps": ClipsBeforeSteps,
    "late": lambda: ClipsLate("by its own norm"),
}


def told(layout: Layout, how: str, num_rows: int = 24) -> str:
    module: L.LightningModule = Projects(how) if how.startswith("weights") else Clips(how)
    if how in KINDS:
        module = KINDS[how]()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            make_trainer(layout, max_epochs=1, limit_val_batches=0).fit(module, Data(num_rows))
        except RuntimeError as error:
            return str(error)
    return "".join(str(one.message) for one in found if "changed the " in str(one.message)) or "done"


@pytest.mark.parametrize("length", [2, 3, 11, 16, 23])
def test_a_fingerprint_is_of_every_element_and_its_place(length: int) -> None:
    values = torch.arange(1.0, length + 1)
    whole = hook_check.fingerprint(values, values.device)
    for place in range(length - 1):
        order = list(range(length))
        order[place], order[place + 1] = place + 1, place
        swapped = hook_check.fingerprint(values[order], values.device)
        # One wave may be as high at both places, and two of them are not.
        assert swapped[0].isclose(whole[0]) and (swapped[1:] - whole[1:]).abs().max() > 0.01


@pytest.mark.parametrize(
    ("layout", "how", "shown"),
    [
        (TP2, "by its own norm", HOOK + "differently on the ranks that hold a weight together:\n  - after.bias\n"),
        (PP2, "by its own norm", HOOK + "differently on the ranks that hold"),
        (
            PP2,
            "its chain by its own norm",
            "changed the gradients of step 1 by another factor on each pipeline stage (rank ",
        ),
        (DP2, "with noise", HOOK + "differently on the ranks that hold"),
        (TP2, "with noise", HOOK + "differently on the ranks that hold"),
        (TP2, "its chain halved on the last rank", HOOK + "differently on the ranks that hold"),
        (TP2, "before steps", "SGD.step_pre_hook changed the gradients of step 0 differently on the ranks that hold"),
        (ZERO, "before steps", "SGD.step_pre_hook changed the gradients of step 0 differently on the ranks that hold"),
    ],
)
def test_ranks_that_do_different_things_end_the_run(layout: Layout, how: str, shown: str) -> None:
    for found in run_on_ranks(2, told, layout, how, init=False):
        assert shown in found and "clip_grad_norm_(self, max_norm)" in found


@pytest.mark.parametrize(
    ("layout", "how", "shown"),
    [
        (
            TP2,
            "weights each onto a ball",
            "weights of step 1 differently on the ranks that hold a weight together:\n  - ",
        ),
        (
            PP2,
            "weights all onto a ball",
            "weights of step 1 differently on the ranks that hold a weight together:\n  - ",
        ),
        (
            TP2,
            "weights all onto a ball",
            "weights of step 1 differently on the ranks that hold a weight together:\n  - ",
        ),
    ],
)
def test_weights_that_ranks_change_differently_end_the_run(layout: Layout, how: str, shown: str) -> None:
    for found in run_on_ranks(2, told, layout, how, init=False):
        assert f"Projects.on_train_batch_end changed the {shown}" in found and "weight_norm(self)" in found


def told_of_late_clips() -> str:
    # Looks at every step are over before it clips.
    hook_check._NUM_WATCHED, hook_check._EVERY = 1, 2
    return told(TP2, "late", num_rows=40)


def test_what_hooks_begin_to_do_late_is_found_when_they_are_looked_at_again() -> None:
    for found in run_on_ranks(2, told_of_late_clips, init=False):
        assert "ClipsLate.on_before_optimizer_step changed the gradients of step 4 differently" in found


def clips(trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.01)


def fit_with_a_function() -> None:
    callback = LambdaCallback(on_before_optimizer_step=clips)
    make_trainer(TP2, max_epochs=1, limit_val_batches=0, callbacks=[callback]).fit(Small(), Data(24))


def test_a_function_in_a_callback_of_lightnings_is_a_user_s() -> None:
    with pytest.raises(RankFailed, match=r"LambdaCallback\.on_before_optimizer_step changed the gradients of step 0"):
        run_on_ranks(2, fit_with_a_function, init=False)


def test_a_factor_of_a_stages_own_is_told_once() -> None:
    first, second = run_on_ranks(2, told, PP2, "its chain halved on the last rank", init=False)
    assert first.startswith(f"{HOOK}by another factor on each pipeline stage (rank 0: 1, rank 1: 0.5)")
    assert first.count("changed the gradients") == 1 and second == "done"


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        (DP2, "by its own norm"),
        (ZERO, "by its own norm"),
        (ZERO, "halved"),
        (TP2, "by the model's norm"),
        (PP2, "by the model's norm"),
        (TP2, "by value"),
        (PP2, "by value"),
        (PP2, "halved"),
        (TP2, "nothing"),
        (DP2, "weights all onto a ball"),
        (ZERO, "weights each onto a ball"),
        (PP2, "weights each onto a ball"),
        (TP2, "weights onto a ball by the model's norm"),
        (PP2, "weights onto a ball by the model's norm"),
        (TP2, "weights within bounds"),
        (PP2, "weights halved"),
        # One of these ranks steps nothing.
        (ZERO, "one weight"),
    ],
)
def test_what_all_ranks_do_alike_goes_on(layout: Layout, how: str) -> None:
    assert run_on_ranks(layout.world, told, layout, how, init=False) == ["done"] * layout.world
