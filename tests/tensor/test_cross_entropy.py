"""Tests of the cut cross-entropy against torch's: losses and gradients, whatever the cut and the padding."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from lightning_megatron.comm.collectives import shard_slice
from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.sharding import cut_length
from lightning_megatron.tensor.cross_entropy import vocab_parallel_cross_entropy
from lightning_megatron.tensor.vocabulary import num_own
from tests.harness.ranks import run_on_ranks
from tests.harness.threads import run_on_threads
from tests.tensor.plain import BITE, TOLERANCE, distance, gradient, thread_mesh

T, V = 24, 131


def some_labels() -> Tensor:
    """Labels at both ends and in the middle of the vocabulary, and some that are no target."""
    labels = torch.randint(V, (T,))
    labels[:6] = torch.tensor([0, V - 1, 65, 66, -100, -100])
    return labels


def padded(logits_TV: Tensor, length: int, size: int, value: float) -> Tensor:
    """The logits of the unsplit vocabulary followed by columns of `value`, as many as `size` ranks hold."""
    return F.pad(logits_TV, (0, length * size - V), value=value)


def check(tp: Axis, multiple: int, label_smoothing: float) -> None:
    """Losses and gradients on this axis equal torch's on one device."""
    logits = (3.0 * torch.randn(T, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).requires_grad_()
    labels = torch.tensor([0, V - 1, 65, 66, -100, -100, *range(1, 129, 128 // (T - 6))])[:T]
    loss_grad = torch.linspace(-1.0, 2.0, T, dtype=torch.float64)
    plain = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    plain.backward(loss_grad)

    length = cut_length(V, tp, multiple)
    # Padding that any softmax would notice.
    own = shard_slice(padded(logits.detach(), length, tp.size, 50.0), tp, dim=1).clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(own, labels, tp=tp, vocab_size=V, label_smoothing=label_smoothing)
    assert_close(losses, plain, rtol=TOLERANCE, atol=TOLERANCE)
    losses.backward(loss_grad)
    wanted = shard_slice(padded(gradient(logits), length, tp.size, 0.0), tp, dim=1)
    assert_close(gradient(own), wanted, rtol=0, atol=TOLERANCE)
    assert not gradient(own)[:, num_own(V, length, tp) :].any()
    assert not gradient(own)[4:6].any() and not losses[4:6].any()
    if multiple > 1:
        with_padding = torch.logsumexp(padded(logits.detach(), length, tp.size, 50.0), 1) - logits.detach()[:, 0]
        assert distance(with_padding[:1], losses[:1].detach()) > BITE


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("multiple", [1, 128])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_a_cut_cross_entropy_equals_the_plain_one(num_ranks: int, multiple: int, label_smoothing: float) -> None:
    # Four ranks with 128 columns each: two of them hold no valid column.
    run_on_threads(num_ranks, lambda world: check(thread_mesh(world, False).tp, multiple, label_smoothing))


def check_on_gloo() -> None:
    size = torch.distributed.get_world_size()
    mesh = Mesh.build(
        Sizes(world=size, tp=size),
        torch.distributed.get_rank(),
        lambda ranks: torch.distributed.new_group(list(ranks)),
    )
    check(mesh.tp, 128, 0.1)


def test_a_cut_cross_entropy_equals_the_plain_one_on_real_ranks() -> None:
    run_on_ranks(4, check_on_gloo)


def test_label_smoothing_takes_the_mean_over_the_full_vocabulary() -> None:
    logits, labels, smoothing = torch.randn(T, V, dtype=torch.float64), some_labels().clamp(min=0), 0.1
    plain = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)

    def on_rank(world: Any) -> Tensor:
        tp = thread_mesh(world, False).tp
        own = shard_slice(padded(logits, 66, 2, 0.0), tp, dim=1)
        losses = vocab_parallel_cross_entropy(own, labels, tp=tp, vocab_size=V, label_smoothing=smoothing)
        assert_close(losses, plain, rtol=TOLERANCE, atol=TOLERANCE)
        return own

    for own in run_on_threads(2, on_rank):
        log_sum = torch.logsumexp(logits, 1)
        nll = log_sum - logits.gather(1, labels.unsqueeze(1)).squeeze(1)
        of_own_columns = (1 - smoothing) * nll + smoothing * (log_sum - own.mean(1))
        assert distance(of_own_columns, plain) > BITE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_logits_are_summed_in_float32_and_get_gradients_of_their_own_dtype(dtype: torch.dtype) -> None:
    tp = Mesh.single().tp
    logits = (4.0 * torch.randn(T, V)).to(dtype).requires_grad_()
    double = logits.detach().double().requires_grad_()
    labels = some_labels()
    losses = vocab_parallel_cross_entropy(logits, labels, tp=tp, vocab_size=V)
    # float32 rounds sums of 131 numbers; in the half types the error would be a thousand times as large.
    plain = F.cross_entropy(double, labels, reduction="none")
    assert losses.dtype == torch.float32
    assert_close(losses.double(), plain, rtol=1e-6, atol=1e-6)
    if dtype != torch.float32:
        rounded = torch.logsumexp(double, 1).to(dtype) - logits.detach()[:, 0]
        assert distance(rounded.double(), torch.logsumexp(double, 1) - double[:, 0]) > 1e-4
    losses.sum().backward()
    plain.sum().backward()
    assert gradient(logits).dtype == dtype
    # One rounding of the result.
    assert_close(gradient(logits).double(), gradient(double), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_it_is_the_same_under_autocast() -> None:
    tp = Mesh.single().tp
    logits, labels = torch.randn(T, V), some_labels()
    losses = vocab_parallel_cross_entropy(logits, labels, tp=tp, vocab_size=V)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert losses.equal(vocab_parallel_cross_entropy(logits, labels, tp=tp, vocab_size=V))
    assert losses.dtype == torch.float32


def test_huge_logits_and_forbidden_columns_give_finite_losses() -> None:
    logits = torch.randn(T, V) + 1e4
    logits[:, 70:] = -torch.inf
    labels = torch.randint(70, (T,))
    plain = F.cross_entropy(logits, labels, reduction="none")
    assert plain.isfinite().all()

    def on_rank(world: Any) -> None:
        tp = thread_mesh(world, False).tp
        # The last of four ranks sees no finite logit.
        own = shard_slice(padded(logits, 33, 4, 0.0), tp, dim=1).clone().requires_grad_()
        losses = vocab_parallel_cross_entropy(own, labels, tp=tp, vocab_size=V)
        assert_close(losses, plain, rtol=1e-6, atol=1e-6)
        losses.sum().backward()
        assert gradient(own).isfinite().all()

    run_on_threads(4, on_rank)


def test_the_logits_are_left_as_they_were() -> None:
    logits = torch.randn(T, V, requires_grad=True)
    before = logits.detach().clone()
    labels = some_labels()
    losses = vocab_parallel_cross_entropy(logits, labels, tp=Mesh.single().tp, vocab_size=V)
    losses.sum().backward()
    assert logits.detach().equal(before)
    # Unless they are given as the scratch; the results are the same.
    copied = before.clone().requires_grad_()
    own = vocab_parallel_cross_entropy(copied, labels, tp=Mesh.single().tp, vocab_size=V, scratch_TV=copied.detach())
    own.sum().backward()
    assert own.equal(losses) and gradient(copied).equal(gradient(logits))
    assert not copied.detach().equal(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_tensor_is_saved_for_backward_of_the_size_of_the_logits(dtype: torch.dtype) -> None:
    logits = torch.randn(T, V).to(dtype).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda saved: saved):
        vocab_parallel_cross_entropy(logits, some_labels(), tp=Mesh.single().tp, vocab_size=V)
    assert [(len(each), each.dtype) for each in saved if each.numel() > T] == [(T, torch.float32)]


def test_a_second_backward_is_refused() -> None:
    logits = torch.randn(T, V, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, some_labels(), tp=Mesh.single().tp, vocab_size=V).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("bad_label", [-1, V, 140])
def test_a_label_outside_of_the_vocabulary_raises(bad_label: int) -> None:
    labels = torch.full((T,), bad_label)

    def on_rank(world: Any) -> None:
        tp = thread_mesh(world, False).tp
        with pytest.raises(RuntimeError, match="out of bounds"):
            vocab_parallel_cross_entropy(torch.randn(T, 128), labels, tp=tp, vocab_size=V)

    # The ranks have met once, for the maximum, before they look up their labels: none is left waiting.
    run_on_threads(2, on_rank)
