"""Tests of the activation between the matrices of experts: it equals autograd's, and saves only its inputs."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from lightning_megatron.moe.weighted_activation import scale_rows, weighted_activation
from lightning_megatron.tensor.activation import GATED, Activation, activate

every_activation = pytest.mark.parametrize("activation", get_args(Activation))


def in_two_steps(x: Tensor, weights: Tensor, activation: Any) -> Tensor:
    """The same with autograd's own gradient of the product."""
    activated = activate(x, activation)
    wide = torch.promote_types(torch.promote_types(x.dtype, weights.dtype), torch.float32)
    return (activated * weights[:, None].to(wide)).to(x.dtype)


def input_of(activation: Any, rows: int, features: int) -> Tensor:
    return torch.randn(rows, *((2,) if activation in GATED else ()), features)


@every_activation
@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "tolerance"),
    # Sums of 24 products; in 16 bits all is rounded where autograd rounds it, and sums are in float32.
    [
        (torch.float64, torch.float64, 1e-14),
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 1e-5),
        (torch.float16, torch.float64, 1e-5),
    ],
)
def test_output_and_gradients_are_those_of_both_steps_by_themselves(
    activation: Any, dtype: torch.dtype, weight_dtype: torch.dtype, tolerance: float
) -> None:
    x = input_of(activation, 7, 24).to(dtype).requires_grad_()
    weights = torch.rand(7).to(weight_dtype).requires_grad_()
    ours, theirs = (fn(x, weights, activation) for fn in (weighted_activation, in_two_steps))
    assert ours.dtype == dtype and torch.equal(ours, theirs)
    # An expanded gradient, as that of a sum is, is no plain tensor in memory.
    for grad in (torch.randn(7, 24).to(dtype), torch.ones((), dtype=dtype).expand(7, 24)):
        found, wanted = (torch.autograd.grad(y, (x, weights), grad, retain_graph=True) for y in (ours, theirs))
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("activation", sorted(GATED))
def test_the_gradients_of_a_weighed_gate_are_those_that_differences_show(activation: Any) -> None:
    x = input_of(activation, 3, 5).double().requires_grad_()
    weights = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weights: weighted_activation(x, weights, activation), (x, weights))


@pytest.mark.parametrize("activation", sorted(GATED))
def test_a_weighed_gate_saves_what_it_reads_alone(activation: Any) -> None:
    x, weights = input_of(activation, 4, 8).requires_grad_(), torch.rand(4, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        weighted_activation(x, weights, activation)
    assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr(), weights.data_ptr()]


@pytest.mark.parametrize("activation", sorted(GATED))
def test_no_rows_and_weights_that_learn_nothing_are_taken(activation: Any) -> None:
    for rows in (0, 4):
        x = input_of(activation, rows, 8).requires_grad_()
        weighted_activation(x, torch.rand(rows), activation).sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape


def test_weights_multiply_in_float32_and_only_then_are_rows_rounded() -> None:
    x, weights = torch.randn(64, 8).bfloat16(), torch.rand(64)
    weighed = scale_rows(x, weights)
    assert weighed.dtype == torch.bfloat16
    assert torch.equal(weighed, (x.float() * weights[:, None]).bfloat16())
    assert not torch.equal(weighed, x * weights.bfloat16()[:, None])
    assert scale_rows(x.double(), weights).dtype == torch.float64
