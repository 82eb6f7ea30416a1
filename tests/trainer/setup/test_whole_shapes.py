"""Parameters are sorted by the shapes that they have on one device, and optimizers see what a rank holds."""

from typing import Any

import torch

from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.sharding import Initial
from lightning_megatron.tensor.linear import ColumnParallelLinear
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


def test_shapes_alone_are_those_of_the_unsplit_model_and_in_the_block_alone() -> None:
    tp = Mesh.imagine(0, Sizes(world=2, tp=2)).tp
    module = ColumnParallelLinear(8, 16, tp=tp, sp=Axis.alone(0), bias=True, initial=Initial(std=1.0))
    with WholeShapes(module):
        weight = module.weight
        assert (weight.shape, weight.size(), weight.size(0), weight.size(dim=-1)) == ((16, 8), (16, 8), 16, 8)
        assert (len(weight), weight.numel(), weight.nelement()) == (16, 128, 128)
        # All else is that of the rank.
        assert weight.sum(1).shape == (8,) and weight.detach().numel() == 64
    assert module.weight.shape == (8, 8)
