"""The MLP and its gate equal plain torch, and the gate saves nothing but its input."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_megatron.mesh import Mesh
from lightning_megatron.tensor.activation import activate
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.init import initialise
from lightning_megatron.transformer.mlp import MLP


def test_the_gate_and_its_gradient_equal_plain_torch() -> None:
    x = torch.randn(5, 2, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 7, dtype=torch.float64)
    (grad,) = torch.autograd.grad((activate(x, "swiglu") * weight).sum(), x)
    (expected,) = torch.autograd.grad((F.silu(x[:, 0]) * x[:, 1] * weight).sum(), x)
    assert (grad - expected).abs().max() < 1e-13
    assert torch.autograd.gradcheck(lambda x: activate(x, "swiglu"), (x,))


def test_the_gate_saves_its_input_alone() -> None:
    saved: list[torch.Tensor] = []
    x = torch.randn(5, 2, 7, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        activate(x, "swiglu")
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_both_kinds_of_gelu_are_distinguished(activation: Any) -> None:
    mesh = Mesh.single()
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, activation=activation, add_bias_linear=False, init_std=1.0
    )
    mlp = MLP(config, tp=mesh.tp, sp=mesh.sp, name="mlp").double()
    initialise(mlp, seed=1)
    x = torch.randn(4, 8, dtype=torch.float64)
    weights = dict(mlp.named_parameters())

    def plain(approximate: str) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, weights["up.weight"]), approximate=approximate), weights["down.weight"])

    own, other = ("none", "tanh") if activation == "gelu" else ("tanh", "none")
    assert (mlp(x) - plain(own)).abs().max() < 1e-12
    assert (mlp(x) - plain(other)).abs().max() > 1e-5
