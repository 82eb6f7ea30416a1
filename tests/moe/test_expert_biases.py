"""Biases of experts: with them experts equal loops over biased experts on every layout, in output and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.comm.collectives import shard_slice
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.moe.experts import DispatchedTokens, ExpertAxes, Experts
from lightning_megatron.moe.grouped_gemm import GROUPED_GEMM, SEQUENTIAL_GEMM, ExpertGemm, ExpertGroups
from lightning_megatron.moe.shared_expert import SharedExpert
from lightning_megatron.moe.token_dispatcher import AllToAllTokenDispatcher, TokenDispatcher, moe_forward
from lightning_megatron.sharding import shard_of
from lightning_megatron.tensor.activation import Activation
from tests.harness.ranks import run_on_ranks
from tests.harness.threads import run_on_threads
from tests.moe.plain import (
    BITE,
    FFN,
    INITIAL,
    E,
    H,
    K,
    assert_same,
    dispatcher_of,
    on_every_layout,
    on_mesh,
    own,
    with_either_dispatcher,
)
from tests.tensor.plain import assert_gradient_is_slice, fill, part_of, thread_mesh
from tests.tensor.plain import on_every_layout as on_every_tensor_layout

Make = Callable[..., TokenDispatcher]
NAMES = ("up", "down", "up_bias", "down_bias")


def activated(y: Tensor, activation: Activation) -> Tensor:
    if activation == "swiglu":
        return F.silu(y[0]) * y[1]
    return F.gelu(y)


class Plain:
    """Biased experts in float64 on one device; rank r of a mesh has the r-th of the equal shares of tokens."""

    def __init__(self, num_tokens: int, activation: Activation = "gelu") -> None:
        generator = torch.Generator().manual_seed(num_tokens)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.activation = activation
        width = (2, FFN) if activation == "swiglu" else (FFN,)
        self.hidden = random(num_tokens, H).requires_grad_()
        self.weights = random(num_tokens, K).sigmoid().requires_grad_()
        self.experts = random(num_tokens, E).topk(K, dim=1).indices
        # Choices that are none, and an expert that nobody chose.
        self.experts[self.experts == 1] = -1
        shapes = ((E, *width, H), (E, H, FFN), (E, *width), (E, H))
        self.parameters = {name: random(*shape).requires_grad_() for name, shape in zip(NAMES, shapes, strict=True)}
        self.out_grad = random(num_tokens, H)

    def run(self, *, has_bias: bool = True) -> Tensor:
        """The output; the gradients are then on all tensors."""
        up, down, up_bias, down_bias = self.parameters.values()
        rows = []
        for x, experts, weights in zip(self.hidden, self.experts.tolist(), self.weights, strict=True):
            row = torch.zeros(H, dtype=torch.float64)
            for expert, weight in zip(experts, weights, strict=True):
                if expert >= 0:
                    y = activated(up[expert] @ x + up_bias[expert] * has_bias, self.activation)
                    row = row + weight * (down[expert] @ y + down_bias[expert] * has_bias)
            rows.append(row)
        out = torch.stack(rows)
        for leaf in (self.hidden, self.weights, *self.parameters.values()):
            leaf.grad = None
        out.backward(self.out_grad)
        return out.detach()


def experts_of(plain: Plain, mesh: Mesh, gemm: ExpertGemm = GROUPED_GEMM) -> Experts:
    experts = Experts(
        E,
        H,
        FFN,
        activation=plain.activation,
        initial=INITIAL,
        output_initial=INITIAL,
        axes=ExpertAxes.of(mesh),
        has_bias=True,
        gemm=gemm,
    ).double()
    for name, full in plain.parameters.items():
        fill(experts.get_parameter(name), full.detach())
    return experts


def check(plain: Plain, out: Tensor, make: Make, mesh: Mesh, gemm: ExpertGemm = GROUPED_GEMM) -> None:
    experts = experts_of(plain, mesh, gemm)
    hidden, weights = own(plain.hidden, mesh).requires_grad_(), own(plain.weights, mesh).requires_grad_()
    dispatcher = dispatcher_of(make, mesh)
    mixed, _ = moe_forward(hidden, own(plain.experts, mesh), weights, dispatcher=dispatcher, experts=experts)
    assert_same(mixed, own(out, mesh))
    mixed.backward(own(plain.out_grad, mesh))
    for leaf, full in ((hidden, plain.hidden), (weights, plain.weights)):
        assert leaf.grad is not None and full.grad is not None
        assert_same(leaf.grad, own(full.grad, mesh))
    for name, full in plain.parameters.items():
        parameter = experts.get_parameter(name)
        shard = shard_of(parameter)
        assert parameter.grad is not None and full.grad is not None
        assert shard.data is not None and shard.partial is None
        # The one sum that the engine makes of what its `Shard` says.
        summed = collectives.all_reduce(parameter.grad, shard.data)
        assert_same(shard.valid(summed), part_of(full.grad, shard))
        assert summed.count_nonzero() == shard.valid(summed).count_nonzero()
        # Copies stay copies.
        for axis in shard.replicas:
            assert torch.equal(
                collectives.all_gather(parameter.grad[None], axis),
                parameter.grad[None].expand(axis.size, *parameter.grad.shape),
            )


@on_every_layout
@with_either_dispatcher
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_biased_experts_on_any_layout_equal_a_loop_over_them(
    world_size: int, ep: int, etp: int, make: Make, activation: Any
) -> None:
    plain = Plain(5 * world_size, activation)
    unbiased = plain.run(has_bias=False)
    out = plain.run()
    assert (out - unbiased).abs().max() > BITE
    on_mesh(world_size, ep, etp, lambda mesh: check(plain, out, make, mesh))


def test_biased_experts_one_by_one_equal_the_loop() -> None:
    plain = Plain(20)
    out = plain.run()
    on_mesh(4, 2, 2, lambda mesh: check(plain, out, AllToAllTokenDispatcher, mesh, SEQUENTIAL_GEMM))


def gloo_rank() -> None:
    def new_group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        return dist.new_group(list(ranks), use_local_synchronization=True)

    mesh = Mesh.build(Sizes(world=4, ep=2, etp=2), dist.get_rank(), new_group)
    plain = Plain(20)
    check(plain, plain.run(), AllToAllTokenDispatcher, mesh)


def test_biased_experts_equal_the_loop_on_real_ranks() -> None:
    run_on_ranks(4, gloo_rank)


@pytest.mark.parametrize("gemm", [SEQUENTIAL_GEMM, GROUPED_GEMM])
def test_under_autocast_biases_are_added_wide_and_have_gradients_of_their_own_dtype(gemm: ExpertGemm) -> None:
    plain = Plain(8)
    experts, low = (experts_of(plain, Mesh.single(), gemm).float() for _ in range(2))
    sizes = (4, 0, 3, 0, 1, 0, 0, 5)
    groups = ExpertGroups.known(sizes, torch.tensor(sizes))
    rows, weights = torch.randn(13, H), torch.rand(13)
    out = experts(DispatchedTokens(rows, weights, groups))
    out.sum().backward()
    low_weights = weights.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low_out = low(DispatchedTokens(rows, low_weights, groups))
    assert low_out.dtype == torch.bfloat16
    # Of bfloat16's 8 bits the last, of sums of some ten products of numbers near 1.
    torch.testing.assert_close(low_out.float(), out, rtol=0.05, atol=0.3)
    low_out.float().sum().backward()
    assert low_weights.grad is not None and low_weights.grad.dtype == torch.float32
    for name in NAMES:
        assert low.get_parameter(name).grad.dtype == torch.float32
    # Products of ones and weights round nothing but their sum.
    torch.testing.assert_close(low.down_bias.grad, experts.down_bias.grad)
    assert experts.down_bias.grad[0, 0] == pytest.approx(float(weights[:4].sum()))
    assert experts.down_bias.grad[1].count_nonzero() == 0 == experts.up_bias.grad[1].count_nonzero()


@on_every_tensor_layout
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_biased_shared_expert_equals_plain_torch(num_ranks: int, is_sequence_parallel: bool, activation: Any) -> None:
    width = (2, FFN) if activation == "swiglu" else (FFN,)
    shapes = {"up.weight": (*width, H), "up.bias": width, "down.weight": (H, FFN), "down.bias": (H,)}
    full = {name: torch.randn(shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}
    x = torch.randn(8, H, dtype=torch.float64, requires_grad=True)
    out_grad = torch.randn(8, H, dtype=torch.float64)
    up, up_bias, down, down_bias = full.values()
    out = torch.stack([down @ activated(up @ row + up_bias, activation) + down_bias for row in x])
    out.backward(out_grad)

    def on_rank(world: Any) -> None:
        mesh = thread_mesh(world, is_sequence_parallel)
        shared = SharedExpert(
            H,
            FFN,
            activation=activation,
            has_gate=False,
            has_bias=True,
            initial=INITIAL,
            output_initial=INITIAL,
            tp=mesh.tp,
            sp=mesh.sp,
        ).double()
        assert {name for name, _ in shared.named_parameters()} == set(full)
        for name, tensor in full.items():
            fill(shared.get_parameter(name), tensor.detach())
        hidden = shard_slice(x.detach(), mesh.sp).clone().requires_grad_()
        made = shared(hidden)
        assert_same(made, shard_slice(out.detach(), mesh.sp))
        made.backward(shard_slice(out_grad, mesh.sp))
        assert hidden.grad is not None and x.grad is not None
        assert_same(hidden.grad, shard_slice(x.grad, mesh.sp))
        for name, tensor in full.items():
            assert tensor.grad is not None
            assert_gradient_is_slice(shared.get_parameter(name), tensor.grad)

    run_on_threads(num_ranks, on_rank)
