"""The loss of hidden states in chunks equals that of their logits: values, gradients, where they go, and its memory."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.comm.collectives import shard_slice
from lightning_megatron.mesh import Mesh
from lightning_megatron.sharding import cut_length
from lightning_megatron.tensor.cross_entropy import vocab_parallel_cross_entropy
from lightning_megatron.tensor.linear import column_parallel_linear
from lightning_megatron.tensor.linear_cross_entropy import linear_cross_entropy
from lightning_megatron.tensor.weight_gradients import WeightGradients
from tests.harness.threads import run_on_threads
from tests.tensor.plain import BITE, TOLERANCE, distance, gradient, on_every_layout, thread_mesh

T, H, V = 24, 12, 131
LABELS = torch.tensor([0, V - 1, 65, 66, -100, -100, *range(1, 129, 128 // (T - 6))])[:T]
LOSS_GRAD = torch.linspace(-1.0, 2.0, T, dtype=torch.float64)


def some(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rows(full: Tensor, mesh: Mesh, multiple: int) -> Tensor:
    """Own rows of a weight or bias of the full vocabulary, padding any softmax would notice included."""
    length = cut_length(V, mesh.tp, multiple)
    padding = torch.full((length * mesh.tp.size - V, *full.shape[1:]), 50.0, dtype=full.dtype)
    return shard_slice(torch.cat((full, padding)), mesh.tp, dim=0).clone()


def check(world: Any, is_sequence_parallel: bool, multiple: int, smoothing: float, chunk: int, mode: str) -> None:
    mesh = thread_mesh(world, is_sequence_parallel)
    hidden, weight, bias = some(T, H, seed=1), some(V, H, seed=2), some(V, seed=3)
    for one in (hidden, weight, bias):
        one.requires_grad_()
    plain = F.cross_entropy(hidden @ weight.T + bias, LABELS, reduction="none", label_smoothing=smoothing)
    plain.backward(LOSS_GRAD)

    own = shard_slice(hidden.detach(), mesh.sp, dim=0).clone().requires_grad_()
    own_weight, own_bias = (nn.Parameter(rows(one.detach(), mesh, multiple)) for one in (weight, bias))
    gradients = WeightGradients()
    losses = linear_cross_entropy(
        own,
        own_weight,
        own_bias,
        LABELS,
        tp=mesh.tp,
        sp=mesh.sp,
        vocab_size=V,
        chunk_tokens=chunk,
        gradients=gradients,
        label_smoothing=smoothing,
    )
    assert_close(losses, plain, rtol=TOLERANCE, atol=TOLERANCE)
    if mode == "return":
        losses.backward(LOSS_GRAD)
    else:
        tasks: list[Any] = []
        with gradients.opened(tasks if mode == "defer" else None):
            losses.backward(LOSS_GRAD)
        assert not tasks
    assert_close(gradient(own), shard_slice(gradient(hidden), mesh.sp, dim=0), rtol=0, atol=TOLERANCE)
    for ours, full in ((own_weight, weight), (own_bias, bias)):
        wanted = rows(gradient(full), mesh, multiple)
        is_padding = rows(full.detach(), mesh, multiple) == 50.0
        assert_close(gradient(ours), wanted.masked_fill(is_padding, 0.0), rtol=0, atol=TOLERANCE)
    assert not losses[4:6].any() and distance(gradient(own)[:1], gradient(own)[1:2]) > BITE


@on_every_layout
@pytest.mark.parametrize(("multiple", "smoothing"), [(1, 0.0), (128, 0.1)])
@pytest.mark.parametrize(("chunk", "mode"), [(5, "return"), (7, "add"), (100, "defer")])
def test_losses_and_gradients_are_those_of_the_logits(
    num_ranks: int, is_sequence_parallel: bool, multiple: int, smoothing: float, chunk: int, mode: str
) -> None:
    run_on_threads(num_ranks, check, is_sequence_parallel, multiple, smoothing, chunk, mode)


def test_in_16_bits_it_is_as_exact_as_the_logits() -> None:
    mesh = Mesh.single()
    hidden, weight, labels = some(T, H, seed=1), some(V, H, seed=2), LABELS
    exact = F.cross_entropy(hidden @ weight.T, labels, reduction="none")
    low, low_weight = hidden.bfloat16(), weight.bfloat16()
    sizes: Any = {"tp": mesh.tp, "vocab_size": V}
    gradients = WeightGradients()
    fused = linear_cross_entropy(
        low, low_weight, None, labels, sp=mesh.sp, chunk_tokens=8, gradients=gradients, **sizes
    )
    logits = column_parallel_linear(low, low_weight, None, tp=mesh.tp, sp=mesh.sp, gradients=gradients)
    assert fused.dtype == torch.float32
    assert distance(fused, exact) <= 1.01 * distance(vocab_parallel_cross_entropy(logits, labels, **sizes), exact)


@pytest.mark.parametrize("is_added", [False, True])
def test_in_16_bits_chunks_are_summed_in_32(is_added: bool) -> None:
    num_tokens = 4096
    hidden, weight = some(num_tokens, H, seed=1).bfloat16(), some(V, H, seed=2).bfloat16()
    labels = torch.arange(num_tokens) % V
    exact = weight.double().requires_grad_()
    F.cross_entropy(hidden.double() @ exact.T, labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
    assert exact.grad is not None
    mesh, apart = Mesh.single(), {}
    for chunk in (num_tokens, 8):
        gradients, own = WeightGradients(), weight.clone().requires_grad_()
        losses = linear_cross_entropy(
            hidden, own, None, labels, tp=mesh.tp, sp=mesh.sp, vocab_size=V, chunk_tokens=chunk, gradients=gradients
        )
        with gradients.opened() if is_added else nullcontext():
            losses.sum().backward()  # type: ignore[no-untyped-call]
        assert own.grad is not None and own.grad.dtype == torch.bfloat16
        apart[chunk] = distance(own.grad.double(), exact.grad) / float(exact.grad.abs().max())
    # 512 chunks that are rounded one by one are ten times as far.
    assert apart[8] < 2 * apart[num_tokens] < 0.02


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for one in output if isinstance(output, (tuple, list)) else (output,):
            self.numel = max(self.numel, one.numel() if isinstance(one, Tensor) else 0)
        return output


def test_no_more_logits_than_those_of_a_chunk_are_there() -> None:
    mesh = Mesh.single()
    hidden, weight = some(64, H, seed=1).requires_grad_(), some(1000, H, seed=2).requires_grad_()
    labels = torch.arange(64)
    with Largest() as largest:
        linear_cross_entropy(
            hidden,
            weight,
            None,
            labels,
            tp=mesh.tp,
            sp=mesh.sp,
            vocab_size=1000,
            chunk_tokens=8,
            gradients=WeightGradients(),
        ).sum().backward()
    # The weight's own gradient is larger than the logits of 8 tokens, and those of all tokens than that.
    assert 8 * 1000 < largest.numel == 1000 * H < 64 * 1000
