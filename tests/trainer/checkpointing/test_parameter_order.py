"""Every rank knows the order that parameters have on one device."""

import pytest
import torch
from torch import nn

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.pipeline.module import Part, PipelineModule
from lightning_megatron.trainer.checkpointing.parameter_order import in_module_order

PARTS = ("enter", "left.0", "right.0", "left.1", "left.10", "right.1", "leave")


class Around(nn.Module):
    """A pipelined model between other modules; its parts alternate between two containers, and two are tied."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(1))
        self.before = nn.Linear(2, 2)
        shares = {"enter": lambda: nn.Linear(2, 2)}
        parts = [
            Part(name=name, build=lambda: nn.Linear(2, 2), shares=shares if name == "leave" else {}) for name in PARTS
        ]
        self.chain = PipelineModule(parts, mesh=mesh, seed=0)
        self.after = nn.Linear(2, 2)


@pytest.mark.parametrize("vp", [1, 3])
def test_names_of_all_ranks_come_in_the_order_of_one_device_on_every_rank(vp: int) -> None:
    full = [name for name, _ in Around(Mesh.single()).named_parameters()]
    assert full[:1] == ["own"] and full[-1] == "after.bias" and "chain.right.1.bias" in full
    ranks = [Around(Mesh.imagine(rank, Sizes(world=2, pp=2, vp=vp))) for rank in range(2)]
    shown = list(dict.fromkeys(name for module in reversed(ranks) for name, _ in module.named_parameters()))
    # It bites: as ranks tell them, they are in another order.
    assert sorted(shown) == sorted(full) and shown != full
    inside = [tuple(module.state_dict()) for module in reversed(ranks)]
    for module in ranks:
        assert in_module_order(shown, module, inside) == full
        # The optimizers of two data-parallel ranks step parts of one layer each.
        apart = sorted(shown, key=lambda name: name.endswith("weight"))
        assert in_module_order(apart, module, inside) == full
        # And so are those of a group that leaves some out.
        weights = [name for name in shown if name.endswith("weight")]
        assert in_module_order(weights, module, inside) == [name for name in full if name.endswith("weight")]


def test_a_module_that_is_itself_pipelined_has_its_order_too() -> None:
    parts = [Part(name=str(place), build=lambda: nn.Linear(2, 2)) for place in range(12)]
    full = [name for name, _ in PipelineModule(parts, mesh=Mesh.single(), seed=0).named_parameters()]
    second = PipelineModule(parts, mesh=Mesh.imagine(1, Sizes(world=2, pp=2)), seed=0)
    found = in_module_order(sorted(full), second, [tuple(full)])
    # By their text, 10 would come before 9.
    assert found != sorted(full)
    assert [name.split(".")[0] for name in found[::2]] == [str(n) for n in range(12)]
