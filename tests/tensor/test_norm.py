"""Tests of the norms against torch's, on unsharded and on sharded activations."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from lightning_megatron.comm.collectives import shard_slice
from lightning_megatron.mesh import Mesh
from lightning_megatron.tensor.norm import LayerNorm, RMSNorm
from tests.harness.threads import run_on_threads
from tests.tensor.plain import (
    BITE,
    TOLERANCE,
    assert_gradient_is_slice,
    distance,
    fill,
    gradient,
    on_every_layout,
    thread_mesh,
)

T, H, EPS = 16, 24, 1e-5


def plain_norm(kind: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What the norm is by its formula."""
    if kind is LayerNorm:
        centred = x - x.mean(-1, keepdim=True)
        return centred * (centred.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight + bias
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


@on_every_layout
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_a_norm_equals_the_plain_one(num_ranks: int, is_sequence_parallel: bool, kind: Any) -> None:
    x = (3.0 * torch.randn(T, H, dtype=torch.float64) + 1.0).requires_grad_()
    weight, bias = (torch.randn(H, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out_grad = torch.randn(T, H, dtype=torch.float64)
    plain = plain_norm(kind, x, weight, bias)
    plain.backward(out_grad)

    def on_rank(world: Any) -> None:
        mesh = thread_mesh(world, is_sequence_parallel)
        sp = mesh.axis("sp")
        layer = kind(H, eps=EPS, tp=mesh.tp, sp=sp).double()
        own = shard_slice(x.detach(), sp).clone().requires_grad_()
        for name, parameter in layer.named_parameters():
            fill(parameter, {"weight": weight, "bias": bias}[name])
        out = layer(own)
        assert_close(out, shard_slice(plain.detach(), sp), rtol=0, atol=TOLERANCE)
        out.backward(shard_slice(out_grad, sp))
        assert_close(gradient(own), shard_slice(gradient(x), sp), rtol=0, atol=TOLERANCE)
        for name, parameter in layer.named_parameters():
            assert_gradient_is_slice(parameter, gradient({"weight": weight, "bias": bias}[name]))
        if sp.size > 1:
            assert distance(gradient(layer.weight), gradient(weight)) > BITE  # partial until it is summed over sp

    run_on_threads(num_ranks, on_rank)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("parameter_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_half_input_is_normed_in_float32_and_rounded_once(
    kind: Any, parameter_dtype: torch.dtype, is_autocast: bool
) -> None:
    mesh = Mesh.single()
    layer = kind(H, eps=EPS, tp=mesh.tp, sp=mesh.axis("sp")).to(parameter_dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    weight = layer.weight.detach().double()
    bias = layer.bias.detach().double() if kind is LayerNorm else torch.zeros(H)
    # An offset that a mean taken in bfloat16 would blur.
    x = (torch.randn(T, H) + 8.0).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
        out = layer(x)
    exact = plain_norm(kind, x.double(), weight, bias)
    assert out.dtype == torch.bfloat16
    # Half a unit in the last place, and float32 besides.
    assert_close(out.double(), exact, rtol=2**-8, atol=1e-5)
    in_half = plain_norm(kind, x, weight.bfloat16(), bias.bfloat16())
    assert distance(in_half.double(), exact) > 2 * distance(out.double(), exact)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_a_wide_input_is_not_rounded_to_the_dtype_of_the_parameters(kind: Any) -> None:
    mesh = Mesh.single()
    layer = kind(H, eps=EPS, tp=mesh.tp, sp=mesh.axis("sp")).bfloat16()
    torch.nn.init.ones_(layer.weight)
    if kind is LayerNorm:
        torch.nn.init.zeros_(layer.bias)
    x = torch.randn(T, H)
    norm = F.layer_norm(x, (H,), eps=EPS) if kind is LayerNorm else F.rms_norm(x, (H,), eps=EPS)
    assert_close(layer(x), norm, rtol=0, atol=1e-6)
    assert distance(norm.bfloat16().float(), norm) > 1e-4


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_saves_its_input_as_it_is_given(kind: Any, dtype: torch.dtype) -> None:
    mesh = Mesh.single()
    layer = kind(H, eps=EPS, tp=mesh.tp, sp=mesh.axis("sp"))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(T, H, dtype=dtype, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        out = layer(x)
    assert {one.dtype for one in saved if one.numel() == x.numel()} == {dtype}
    # The gradients are those of the norm in float32, rounded once.
    out_grad = torch.randn(T, H).to(dtype)
    out.backward(out_grad)
    exact = x.detach().double().requires_grad_()
    names = {name: one.detach().double().requires_grad_() for name, one in layer.named_parameters()}
    plain_norm(kind, exact, names["weight"], names.get("bias", torch.zeros(H))).backward(out_grad.double())
    assert x.grad is not None and x.grad.dtype == dtype
    assert_close(x.grad.double(), gradient(exact), rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    for name, parameter in layer.named_parameters():
        assert gradient(parameter).dtype == torch.float32
        assert_close(gradient(parameter).double(), gradient(names[name]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_a_norm_in_one_dtype_has_all_derivatives(kind: Any) -> None:
    mesh = Mesh.single()
    layer = kind(4, eps=EPS, tp=mesh.tp, sp=mesh.axis("sp")).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(layer, x)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_a_single_row_of_half_numbers_has_gradients(kind: Any) -> None:
    mesh = Mesh.single()
    layer = kind(H, eps=EPS, tp=mesh.tp, sp=mesh.axis("sp"))
    for parameter in layer.parameters():
        torch.nn.init.ones_(parameter)
    row = torch.randn(H, dtype=torch.bfloat16, requires_grad=True)
    layer(row).sum().backward()
    one = gradient(layer.weight).clone()
    layer.zero_grad()
    layer(row.detach()[None]).sum().backward()
    assert_close(one, gradient(layer.weight), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("frozen", ["input", "parameters"])
def test_gradients_that_nobody_needs_are_not_computed(kind: Any, frozen: str) -> None:
    mesh = Mesh.single()
    layer = kind(H, eps=EPS, tp=mesh.tp, sp=mesh.axis("sp")).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    layer(x).square().sum().backward()
    expected = {name: gradient(one).clone() for name, one in [("x", x), *layer.named_parameters()]}
    layer.zero_grad()
    x.grad = None
    (layer if frozen == "parameters" else x).requires_grad_(False)
    layer(x).square().sum().backward()
    for name, one in [("x", x), *layer.named_parameters()]:
        if (name == "x") == (frozen == "input"):
            assert one.grad is None
        else:
            assert_close(gradient(one), expected[name], rtol=0, atol=0)
