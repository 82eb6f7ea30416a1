"""Parameters are sorted by the shapes that they have on one device, and optimizers see what a rank holds."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.trainer.setup.whole_shapes import WholeShapes
from tests.harness.ranks import run_on_ranks
from tests.trainer.fits import Case, Trace, difference
from tests.trainer.layouts import PLAIN, Layout
from tests.trainer.modules import Small

SIZE, LENGTH = 100, 12


class Allocates(torch.optim.SGD):
    """Makes what it keeps where it is made, from shapes."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=0.1)
        self.kept = {one: torch.zeros(one.shape) for group in self.param_groups for one in group["params"]}

    def step(self, closure: Any = None) -> Any:
        assert all(one.shape == kept.shape for one, kept in self.kept.items())
        return super().step(closure)


class SortsBySize(Small):
    """Decays weights by their number of elements, and raises the rate by the length of one dim."""

    def groups(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for one in self.parameters():
            rate = 0.3 if max(one.shape) > LENGTH and one.size(0) > LENGTH and len(one) > LENGTH else 0.1
            found.append({"params": [one], "weight_decay": 0.5 if one.numel() > SIZE else 0.0, "lr": rate})
        return found

    def configure_optimizers(self) -> Any:
        return Allocates(self.groups())


def sorted_by_size(layout: Layout) -> Trace:
    return Case(module=SortsBySize).run(layout)


def test_groups_by_size_are_those_of_one_device() -> None:
    [wanted] = run_on_ranks(1, sorted_by_size, PLAIN, init=False)
    layout = Layout(world=2, tp=2, optimizer=OptimizerConfig(update_scope="elementwise"))
    for trace in run_on_ranks(2, sorted_by_size, layout, init=False):
        assert difference(trace, wanted) < 1e-12


@pytest.mark.parametrize("read", [lambda one: one.dim(), lambda one: one.sum().item(), lambda one: one.view(-1).shape])
def test_all_else_is_that_of_the_rank(read: Any) -> None:
    module = nn.Linear(3, 4)
    with WholeShapes(module):
        assert read(module.weight) is not None
    assert module.weight.numel() == 12
