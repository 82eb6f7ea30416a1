"""The full model's gradients and norms are those of one device, on every rank of every layout."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import clip_grad_norm_, grad_norm, named_gradients, weight_norm
from lightning_megatron.optim.config import OptimizerConfig
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import PLAIN, Layout, make_trainer
from tests.trainer.modules import Data, Partly

LAYOUTS = {
    "tp2": Layout(world=2, tp=2),
    "pp2": Layout(world=2, pp=2, microbatches=2),
    "dp2": Layout(world=2),
    "distributed dp2": Layout(world=2, optimizer=OptimizerConfig(kind="distributed")),
    "distributed tp2 pp2 dp2": Layout(
        world=8, tp=2, pp=2, microbatches=2, optimizer=OptimizerConfig(kind="distributed")
    ),
}


class Reads(Partly):
    """Reads every norm there is before each step, and clips by one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = {name: gradient for name, gradient in named_gradients(self) if gradient is not None}
        norms = [grad_norm(self, kind) | weight_norm(self, kind) for kind in (2, 1.5, "inf")]
        before = {"before": clip_grad_norm_(self, 0.3), "before, of 3": clip_grad_norm_(self, 0.2, 3)}
        self.found.append({**norms[0], **norms[1], **norms[2], **gradients, **before, **grad_norm(self)})


def found(layout: Layout) -> list[dict[str, Tensor]]:
    module = Reads()
    make_trainer(layout, max_epochs=1, limit_val_batches=0).fit(module, Data())
    return module.found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_and_gradients_are_those_of_one_device(layout: str) -> None:
    [wanted] = run_on_ranks(1, found, PLAIN, init=False)
    # What clipping left is smaller than what it found.
    assert all(step["grad_2.0_norm_total"] < step["before"] for step in wanted)
    for ours in run_on_ranks(LAYOUTS[layout].world, found, LAYOUTS[layout], init=False):
        for step, other in zip(ours, wanted, strict=True):
            assert step.keys() == other.keys()
            torch.testing.assert_close([step[name] for name in other], list(other.values()), rtol=1e-12, atol=1e-14)


def test_norms_are_there_in_a_fit_alone_and_of_positive_powers() -> None:
    class Validates(Partly):
        def on_validation_start(self) -> None:
            grad_norm(self)

    with pytest.raises(RuntimeError, match=r"during trainer.fit only"):
        make_trainer(Layout()).validate(Validates(), Data(), verbose=False)
    module = Partly()
    module.trainer = make_trainer(PLAIN)
    with pytest.raises(ValueError, match=r"norm_type \(0\) must be a positive number or 'inf'"):
        grad_norm(module, 0)
