"""Optimizers that read whole weights, on ranks that hold parts of them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.optim.owned_weights import OwnedWeights
from lightning_megatron.sharding import Initial, shard_of, shard_parameter
from tests.harness.threads import new_group, run_on_threads

NUM_STEPS = 3
# Shape, dim that is cut over tp, or of experts over etp.
WEIGHTS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "rows": ((8, 6), 0),
    "columns": ((6, 8), 1),
    "a dim that two ranks do not divide": ((7, 6), 0),
    "all of it on one rank": ((1, 6), 0),
    "replicated": ((6, 5), None),
    "experts": ((4, 6, 8), 1),
    "biases of experts": ((4, 6), None),
    "without a gradient": ((4, 6), 0),
}


def drawn(step: int, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    return torch.randn(WEIGHTS[name][0], dtype=torch.float64, generator=generator)


def stepped(weights: dict[str, Tensor], owned: Any, take: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adafactor(list(weights.values()), lr=0.1, weight_decay=0.05)
    owned = owned([optimizer])
    for step in range(1, NUM_STEPS + 1):
        for name, weight in weights.items():
            if name != "without a gradient":
                weight.grad = take(weight, drawn(step, name))
        owned.begin_step(optimizer)
        optimizer.step()
        owned.end_step(optimizer)
    assert [id(one) for one in optimizer.param_groups[0]["params"]] == [id(one) for one in weights.values()]
    return optimizer


def whole_steps() -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {name: torch.nn.Parameter(drawn(0, name)) for name in WEIGHTS}
    stepped(weights, OwnedWeights, lambda weight, gradient: gradient)
    return {name: weight.detach() for name, weight in weights.items()}


def own_part(weight: Tensor, whole: Tensor) -> Tensor:
    part = torch.zeros(weight.shape, dtype=torch.float64)
    shard_of(weight).valid(part).copy_(shard_of(weight).part_of(whole))
    return part


def on_rank(world: Any, sizes: Sizes, expected: dict[str, Tensor], owned: Any) -> tuple[list[str], float]:
    """Names of the weights whose states this rank has, and the largest deviation of its parts."""
    mesh = Mesh.build(sizes, world.rank(), new_group)
    weights: dict[str, Tensor] = {}
    for name, (shape, dim) in WEIGHTS.items():
        is_expert = "experts" in name
        axis = None if dim is None else mesh.axis("etp") if is_expert else mesh.tp
        leading = mesh.axis("ep") if is_expert else None
        # By threes, so that one rank pads, too.
        multiple = 3 if name == "rows" else 1
        weight = shard_parameter(
            shape, initial=Initial(), dim=dim, axis=axis, leading=leading, multiple=multiple if dim is not None else 1
        )
        weight.data = own_part(weight, drawn(0, name))
        weights[name] = weight
    optimizer = stepped(weights, owned, own_part)
    deviation = 0.0
    for name, weight in weights.items():
        shard = shard_of(weight)
        # Padding stays zero.
        assert weight.detach().count_nonzero() == shard.valid(weight.detach()).count_nonzero()
        apart = (shard.valid(weight.detach()) - shard.part_of(expected[name])).abs()
        deviation = max(deviation, float(apart.max()) if apart.numel() else 0.0)
    return [name for name, weight in weights.items() if optimizer.state.get(weight)], deviation


@pytest.mark.parametrize(
    "sizes", [Sizes(world=1), Sizes(world=2, tp=2), Sizes(world=4, tp=2, ep=2, etp=2), Sizes(world=2, ep=2)]
)
def test_an_optimizer_steps_parts_as_whole_weights(sizes: Sizes) -> None:
    expected = whole_steps()
    found = run_on_threads(sizes.world, on_rank, sizes, expected, OwnedWeights)
    for names, deviation in found:
        assert_close(deviation, 0.0, rtol=0, atol=1e-12)
        assert "without a gradient" not in names and "replicated" in names
    # Each whole weight has its states once, but where there are copies of it.
    num_copies = {name: sum(name in names for names, _ in found) for name in WEIGHTS}
    assert num_copies["rows"] == sizes.world // sizes.tp
    assert num_copies["experts"] == sizes.world // (sizes.ep * sizes.etp)


class Nothing(OwnedWeights):
    """Leaves each rank its parts."""

    def __init__(self, optimizers: Any) -> None:
        super().__init__(())


def test_parts_by_themselves_step_otherwise() -> None:
    sizes = Sizes(world=2, tp=2)
    [(_, deviation), _] = run_on_threads(2, on_rank, sizes, whole_steps(), Nothing)
    assert deviation > 1e-3
