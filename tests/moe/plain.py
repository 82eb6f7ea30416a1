"""What the tests of experts share: experts in plain torch, looped over, and meshes of threads with experts on them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.moe.experts import ExpertAxes, Experts
from lightning_megatron.moe.grouped_gemm import GROUPED_GEMM, ExpertGemm
from lightning_megatron.moe.token_dispatcher import AllGatherTokenDispatcher, AllToAllTokenDispatcher, TokenDispatcher
from lightning_megatron.sharding import Initial, shard_of
from lightning_megatron.tensor.activation import Activation
from tests.harness.threads import new_group, run_on_threads
from tests.tensor.plain import fill, part_of

# float64 sums of some hundred products of numbers near 1, added up in another order.
TOLERANCE = 1e-11
# A wrong answer must differ by this much at least.
BITE = 1e-3

E, K, H, FFN = 8, 2, 6, 10
INITIAL = Initial(std=0.5)

# World, ep, etp: the rest is edp.
LAYOUTS = [(1, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 2), (4, 4, 1), (4, 2, 1), (4, 1, 2), (4, 1, 4), (8, 4, 2)]
on_every_layout = pytest.mark.parametrize(("world_size", "ep", "etp"), LAYOUTS)
with_either_dispatcher = pytest.mark.parametrize("make", [AllToAllTokenDispatcher, AllGatherTokenDispatcher])


class Plain:
    """Experts in float64 on one device; rank r of the mesh has the r-th of the equal shares of tokens."""

    def __init__(self, num_tokens: int, *, activation: Activation = "gelu", num_chosen: int = K) -> None:
        generator = torch.Generator().manual_seed(num_tokens * 10 + num_chosen)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.activation = activation
        self.hidden = random(num_tokens, H).requires_grad_()
        self.experts = random(num_tokens, E).topk(num_chosen, dim=1).indices
        self.weights = random(num_tokens, num_chosen).sigmoid().requires_grad_()
        width = (2, FFN) if activation == "swiglu" else (FFN,)
        self.up, self.down = random(E, *width, H).requires_grad_(), random(E, H, FFN).requires_grad_()
        self.out_grad = random(num_tokens, H)

    def run(self) -> Tensor:
        """The output; gradients are on the inputs and weights, those of what was not used zero."""
        outputs = []
        for token, x in enumerate(self.hidden):
            output = torch.zeros(H, dtype=torch.float64)
            for choice, expert in enumerate(self.experts[token].tolist()):
                if expert >= 0:
                    y = self.up[expert] @ x
                    if self.activation == "swiglu":
                        y = F.silu(y[0]) * y[1]
                    else:
                        y = F.gelu(y, approximate="tanh" if self.activation == "gelu_tanh" else "none")
                    output = output + self.weights[token, choice] * (self.down[expert] @ y)
            outputs.append(output)
        out = torch.stack(outputs)
        leaves = [self.hidden, self.weights, self.up, self.down]
        grads = torch.autograd.grad(out, leaves, self.out_grad, allow_unused=True, materialize_grads=True)
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        return out.detach()


def expert_mesh(world: Any, ep: int, etp: int, *, tp: int = 1) -> Mesh:
    sizes = Sizes(world=world.size(), ep=ep, etp=etp, tp=tp, sequence_parallel=tp > 1)
    return Mesh.build(sizes, world.rank(), new_group)


def on_mesh(world_size: int, ep: int, etp: int, fn: Callable[[Mesh], Any]) -> list[Any]:
    return run_on_threads(world_size, lambda world: fn(expert_mesh(world, ep, etp)))


def dispatcher_of(make: Callable[..., TokenDispatcher], mesh: Mesh) -> TokenDispatcher:
    return make(E, ep=mesh.axis("ep"), etp=mesh.axis("etp"))


def experts_of(plain: Plain, mesh: Mesh, gemm: ExpertGemm = GROUPED_GEMM) -> Experts:
    """This rank's slice of the plain experts."""
    experts = Experts(
        E,
        H,
        FFN,
        activation=plain.activation,
        initial=INITIAL,
        output_initial=INITIAL,
        axes=ExpertAxes.of(mesh),
        gemm=gemm,
    ).double()
    fill(experts.up, plain.up.detach())
    fill(experts.down, plain.down.detach())
    return experts


def own(full: Tensor, mesh: Mesh) -> Tensor:
    """This rank's share of tokens."""
    return collectives.shard_slice(full.detach(), mesh.world).clone()


def assert_same(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def assert_expert_gradients(experts: Experts, plain: Plain) -> None:
    """The gradients, summed over the axis that the shard names, are the plain ones' slices."""
    for parameter, full in ((experts.up, plain.up), (experts.down, plain.down)):
        shard = shard_of(parameter)
        assert shard.data is not None and parameter.grad is not None and full.grad is not None
        summed = collectives.all_reduce(parameter.grad, shard.data)
        assert_same(shard.valid(summed), part_of(full.grad, shard))
        assert summed.count_nonzero() == shard.valid(summed).count_nonzero()
