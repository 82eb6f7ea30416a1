"""Tests of the shared expert: cut over tp it equals plain torch, and is added to what the chosen experts give."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_megatron.comm.collectives import shard_slice
from lightning_megatron.moe.shared_expert import SharedExpert
from lightning_megatron.moe.token_dispatcher import AllToAllTokenDispatcher, moe_forward
from tests.harness.threads import run_on_threads
from tests.moe.plain import (
    BITE,
    FFN,
    INITIAL,
    H,
    Plain,
    assert_same,
    dispatcher_of,
    expert_mesh,
    experts_of,
    own,
)
from tests.tensor.plain import assert_gradient_is_slice, fill, on_every_layout, thread_mesh


class PlainShared:
    """A shared expert in float64 on one device."""

    def __init__(self, activation: str, has_gate: bool) -> None:
        width = (2, FFN) if activation == "swiglu" else (FFN,)
        self.activation, self.has_gate = activation, has_gate
        self.up = torch.randn(*width, H, dtype=torch.float64, requires_grad=True)
        self.down = torch.randn(H, FFN, dtype=torch.float64, requires_grad=True)
        self.gate = torch.randn(1, H, dtype=torch.float64, requires_grad=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.up.flatten(0, -2).t()
        y = F.silu(y[:, :FFN]) * y[:, FFN:] if self.activation == "swiglu" else F.gelu(y)
        out = y @ self.down.t()
        return out * torch.sigmoid(x @ self.gate.t()) if self.has_gate else out

    def cut(self, mesh: Any) -> SharedExpert:
        shared = SharedExpert(
            H,
            FFN,
            activation=self.activation,  # type: ignore[arg-type]
            has_gate=self.has_gate,
            initial=INITIAL,
            output_initial=INITIAL,
            tp=mesh.tp,
            sp=mesh.sp,
        ).double()
        fill(shared.up.weight, self.up.detach())
        fill(shared.down.weight, self.down.detach())
        if shared.gate is not None:
            fill(shared.gate, self.gate.detach())
        return shared


@on_every_layout
@pytest.mark.parametrize(("activation", "has_gate"), [("gelu", False), ("gelu", True), ("swiglu", True)])
def test_a_shared_expert_equals_plain_torch(
    num_ranks: int, is_sequence_parallel: bool, activation: str, has_gate: bool
) -> None:
    plain = PlainShared(activation, has_gate)
    x = torch.randn(8, H, dtype=torch.float64, requires_grad=True)
    out_grad = torch.randn(8, H, dtype=torch.float64)
    out = plain(x)
    out.backward(out_grad)
    if has_gate:
        ungated = PlainShared(activation, False)
        ungated.up, ungated.down = plain.up, plain.down
        assert (ungated(x) - out).abs().max() > BITE

    def on_rank(world: Any) -> None:
        mesh = thread_mesh(world, is_sequence_parallel)
        shared = plain.cut(mesh)
        hidden = shard_slice(x.detach(), mesh.sp).clone().requires_grad_()
        made = shared(hidden)
        assert_same(made, shard_slice(out.detach(), mesh.sp))
        made.backward(shard_slice(out_grad, mesh.sp))
        assert hidden.grad is not None and x.grad is not None and plain.up.grad is not None
        assert_same(hidden.grad, shard_slice(x.grad, mesh.sp))
        assert plain.down.grad is not None
        assert_gradient_is_slice(shared.up.weight, plain.up.grad)
        assert_gradient_is_slice(shared.down.weight, plain.down.grad)
        if shared.gate is not None:
            assert plain.gate.grad is not None
            assert_gradient_is_slice(shared.gate, plain.gate.grad)

    run_on_threads(num_ranks, on_rank)


def test_what_is_computed_while_tokens_travel_equals_plain_torch_where_tp_is_folded_into_ep_and_etp() -> None:
    plain, shared = Plain(4 * 5), PlainShared("gelu", True)
    hidden = plain.hidden.detach().clone().requires_grad_()
    shared_out = shared(hidden)
    shared_out.backward(plain.out_grad)
    out = plain.run() + shared_out.detach()
    assert plain.hidden.grad is not None and hidden.grad is not None
    hidden_grad = plain.hidden.grad + hidden.grad

    def on_rank(world: Any) -> None:
        mesh = expert_mesh(world, 2, 2, tp=2)
        mine = own(plain.hidden, mesh).requires_grad_()
        shared_expert = shared.cut(mesh)
        mixed, made = moe_forward(
            mine,
            own(plain.experts, mesh),
            own(plain.weights, mesh),
            dispatcher=dispatcher_of(AllToAllTokenDispatcher, mesh),
            experts=experts_of(plain, mesh),
            overlapped=lambda: shared_expert(mine),
        )
        assert made is not None
        mixed = mixed + made
        mixed.backward(own(plain.out_grad, mesh))
        assert_same(mixed, own(out, mesh))
        assert mine.grad is not None
        assert_same(mine.grad, own(hidden_grad, mesh))

    run_on_threads(4, on_rank)
