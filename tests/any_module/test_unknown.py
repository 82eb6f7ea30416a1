"""What a stage does not have marks all that is computed from it, and no layer reads it in silence."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.any_module.cut_error import CutError
from lightning_megatron.any_module.cut_model import cut_of
from lightning_megatron.any_module.unknown import Unknown, has_unknown
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.trainer.setup.pipelined_models import cut_plain_networks

ROWS = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "computed",
    [
        lambda x: x + 1,
        lambda x: x > 0,
        lambda x: torch.where(x > 0, 1.0, 0.0),
        lambda x: x.argmax(-1) % 2,
        lambda x: x.long().to(torch.float64) * 0,
        lambda x: torch.stack([x, torch.zeros(2, 3)])[1],
        lambda x: {"a": [x.bool()]},
    ],
)
def test_what_is_computed_from_an_unknown_is_unknown(computed: Any) -> None:
    assert has_unknown(computed(Unknown.like(torch.zeros(2, 3))))
    assert not has_unknown(computed(torch.zeros(2, 3)))
    assert not has_unknown(computed(Unknown.like(torch.zeros(2, 3), is_marked=False)))


@pytest.mark.parametrize(
    "computed",
    [
        lambda x: torch.arange(x.shape[1]),
        lambda x: torch.zeros_like(x),
        lambda x: x.new_ones(3),
        lambda x: torch.ones(2, 3).to(x),
        lambda x: torch.ones(2, 3).type_as(x),
        lambda x: torch.ones(1, 3).expand_as(x),
        lambda x: x.size(0),
    ],
)
def test_shapes_and_dtypes_are_known(computed: Any) -> None:
    assert not has_unknown(computed(Unknown.like(torch.zeros(2, 3))))


class Layer(nn.Module):
    """Returns its output, the place of its largest number, and which numbers are above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        x = x if keep is None else x * keep[..., None]
        y = x + self.linear(x)
        return y, y.argmax(-1), y[..., 0] > 0


class Net(nn.Module):
    """Gives later layers a mask from an earlier one."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        keep = None
        for index, layer in enumerate(self.layers):
            x, place, is_above = layer(x, keep)
            if index == (2 if self.mask == "of the layer before" else 0):
                keep = {"an index": place > 1, "a comparison": x[..., 0] > 0}.get(self.mask, is_above)
        return x.sum()


def cut_module(mask: str, rank: int = 0, pp: int = 1) -> L.LightningModule:
    torch.manual_seed(0)
    module = L.LightningModule()
    module.net = Net(mask).double()
    if pp > 1:
        cut_plain_networks(module, Mesh.imagine(rank, Sizes(world=pp, pp=pp)))
    return module


def over_two_stages(mask: str) -> Any:
    # The last stage is on global rank 0.
    first, last = (cut_of(cut_module(mask, rank, 2).net) for rank in (1, 0))  # type: ignore[arg-type]
    assert first is not None and last is not None
    payload = first.run_stage(0, None, ((ROWS,), {}))
    return last.run_stage(1, payload, ((ROWS,), {}))


def test_a_mask_of_the_stage_itself_is_read() -> None:
    whole = cut_module("of the layer before").net(ROWS).item()  # type: ignore[operator]
    assert over_two_stages("of the layer before").item() == pytest.approx(whole, rel=1e-14)


@pytest.mark.parametrize("mask", ["an index", "a comparison", "a mask"])
def test_a_mask_of_another_stage_is_refused(mask: str) -> None:
    with pytest.raises(CutError, match=r"layers\.2 reads argument 1, which layers of an earlier stage computed"):
        over_two_stages(mask)
