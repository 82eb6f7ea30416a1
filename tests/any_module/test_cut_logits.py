"""Logits of a part of the vocabulary: whatever code does with them, numbers and gradients are those of the whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from lightning_megatron.any_module.cut_logits import CutLogits, joined
from lightning_megatron.any_module.loss_count import mean_count
from lightning_megatron.comm.collectives import shard_slice
from lightning_megatron.mesh import Axis
from tests.harness.threads import run_on_threads
from tests.tensor.plain import gradient, thread_mesh

ROWS, TOKENS, V = 3, 5, 8


def labels() -> Tensor:
    labels = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % V
    return labels.masked_fill(labels == 3, -100)


def flat(logits: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(logits.view(-1, V), labels().view(-1), **options)


def shifted(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits[..., :-1, :].contiguous().double().flatten(0, 1), labels()[:, 1:].flatten())


def soft_capped(logits: Tensor) -> Tensor:
    return flat((torch.tanh(logits / 3) * 3).double() * torch.tensor(0.5))


def read_first(logits: Tensor) -> Tensor:
    assert (logits.argmax(-1) < V).all()
    return flat(logits)


class Squares(torch.autograd.Function):
    """A function that is no part of Python's view of a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.square(x).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * grad * x


class Doubles(torch.autograd.Function):
    """A function that gives what it made of its input's numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def read_without_gradients(logits: Tensor) -> Tensor:
    with torch.no_grad():
        assert (logits.argmax(-1) < V).all() and not (logits * 2).requires_grad
    return flat(logits)


def read_behind(logits: Tensor) -> Tensor:
    return flat(logits) + logits.logsumexp(-1).sum()


def watched(logits: Tensor) -> Tensor:
    logits.register_hook(lambda grad: grad * 10)
    return flat(logits)


def changed_in_place(logits: Tensor) -> Tensor:
    logits = logits * 2
    logits[:, 0] = 1.0
    logits.div_(2)
    return flat(logits) + flat(logits)


def with_a_weight(logits: Tensor) -> Tensor:
    scale = torch.tensor(2.0, requires_grad=True)
    loss = flat(logits * scale)
    [found] = torch.autograd.grad(loss, scale, retain_graph=True)
    return loss * found.detach()


# What is done with logits, and whether they are never gathered for it.
CASES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "flat": (flat, True),
    "sum": (lambda x: flat(x, reduction="sum"), True),
    "each": (lambda x: flat(x, reduction="none").square().sum(), True),
    "smoothed": (lambda x: flat(x, label_smoothing=0.1), True),
    "read first": (read_first, False),
    "read without gradients": (read_without_gradients, False),
    "read within a function": (lambda x: Squares.apply(x) + flat(x), False),  # type: ignore[no-any-return]
    "changed within a function": (lambda x: flat(Doubles.apply(x)) + flat(x), False),
    "watched": (watched, False),
    "recomputed": (lambda x: checkpoint(read_behind, x, use_reentrant=False), False),
    "an ellipsis for no dim": (lambda x: x[:, :, 1:3, ...].square().sum(), False),
    "another ignored label": (lambda x: functional.cross_entropy(x[0], labels()[1].abs(), ignore_index=6), True),
    "reshaped": (lambda x: functional.cross_entropy(x.reshape((ROWS * TOKENS, V)), labels().flatten()), True),
    "shifted": (shifted, True),
    "soft caps": (soft_capped, True),
    "valid tokens": (lambda x: functional.cross_entropy(x[labels() > 0], labels()[labels() > 0]), True),
    "one token": (lambda x: functional.cross_entropy(x[:, -1], labels()[:, 1]), True),
    "twice": (lambda x: flat(x) + shifted(x), True),
    "transposed": (lambda x: functional.cross_entropy(x.transpose(1, 2), labels()), False),
    "class weights": (lambda x: flat(x, weight=torch.arange(1.0, V + 1).double()), False),
    "soft targets": (lambda x: functional.cross_entropy(x.view(-1, V), torch.full((ROWS * TOKENS, V), 0.1)), False),
    "log_softmax": (lambda x: torch.log_softmax(x, -1)[..., 2].sum(), False),
    "one of the vocabulary": (lambda x: x[..., 3].sum() + x[0, 0, 6], False),
    "as one row": (lambda x: x.view(-1).square().sum(), False),
    "an added vector": (lambda x: flat(x + torch.arange(V)), False),
    "a second argument": (lambda x: torch.mul(torch.arange(V), x).sum(), False),
    "z loss": (lambda x: flat(x) + x.logsumexp(-1).square().mean(), False),
    "a function of its own": (lambda x: Squares.apply(x), False),  # type: ignore[no-any-return]
    "changed in place": (changed_in_place, False),
    "scaled by a weight": (with_a_weight, False),
}


def compare(compute: Callable[[Tensor], Tensor], tp: Axis) -> None:
    """The loss, the gradient of this rank's part and what the loss is a mean over are those of the whole."""
    whole = torch.randn(ROWS, TOKENS, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain = whole.clone().requires_grad_()
    wanted = compute(plain * 1)
    count = mean_count(wanted)
    wanted.backward()
    own = shard_slice(whole, tp, 2).clone().requires_grad_()
    logits = joined(own * 1, tp)
    assert isinstance(logits, CutLogits) and logits.shape == whole.shape and logits.requires_grad
    loss = compute(logits)
    assert type(loss) is Tensor and count in (None, mean_count(loss))
    loss.backward(retain_graph=True)
    once = gradient(own).clone()
    loss.backward()
    assert_close(gradient(own), 2 * once)
    assert_close(loss, wanted, rtol=1e-13, atol=0)
    assert_close(once, shard_slice(gradient(plain), tp, 2), rtol=0, atol=1e-14)


@pytest.mark.parametrize("case", CASES)
def test_what_code_does_with_cut_logits_is_done_with_the_whole(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, is_cut = CASES[case]
    if is_cut:
        monkeypatch.setattr(CutLogits, "gathered", None)
    run_on_threads(2, lambda world: compare(compute, thread_mesh(world, False).tp))


def changed_beside_a_view(tp: Axis) -> float:
    logits = joined(torch.ones(2, 3, 4, requires_grad=True) * 1, tp)
    view = logits.view(-1, 4 * tp.size)
    with pytest.raises(RuntimeError, match="were changed in place while a view of them is in use"):
        logits.mul_(2)
    del view
    return float(logits.mul_(2).detach().sum())


def test_a_change_of_logits_beside_a_view_of_them_is_refused() -> None:
    assert run_on_threads(2, lambda world: changed_beside_a_view(thread_mesh(world, False).tp)) == [96.0, 96.0]


def handed_on_after_a_change(tp: Axis) -> None:
    logits = joined(torch.ones(2, 3, 4, requires_grad=True) * 1, tp)
    logits.mul_(2)
    with pytest.raises(RuntimeError, match="were changed in place and then handed to code"):
        Squares.apply(logits).backward()


def test_logits_that_were_changed_are_not_handed_to_other_code() -> None:
    run_on_threads(2, lambda world: handed_on_after_a_change(thread_mesh(world, False).tp))


def test_logits_without_a_gradient_are_whole() -> None:
    own = torch.ones(2, 4, requires_grad=True)
    with torch.no_grad():
        assert type(joined(own, Axis.alone(0, "tp"))) is Tensor
    assert type(joined(own.detach(), Axis.alone(0, "tp"))) is Tensor
