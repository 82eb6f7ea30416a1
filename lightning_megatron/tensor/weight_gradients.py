"""Weight gradients of linears apart from those of their inputs: added in place, or put off.

Autograd makes both gradients of a linear at once, allocates the weight's anew for every microbatch and adds it to what
is there. A schedule that owns the backward can do better: the product adds straight into `.grad`, or, for a schedule
that splits backwards in two, waits in a queue until the order says so. Whoever runs the backward opens a
`WeightGradients` for its duration; the linears look at it; closed, they give autograd what it expects.

Source: Qi et al., arXiv 2401.10241, section 3 (splitting the backward).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor, nn

Task = Callable[[], None]
"""Adds the gradient of one weight, from one microbatch, to its `.grad`."""


class Way(Enum):
    """What a linear does with the gradient of its weight."""

    RETURN = "return it to autograd"
    ADD = "add it to `.grad` now"
    QUEUE = "hand in a task that adds it"


class WeightGradients:
    """Where the linears of a model learn what to do with the gradients of their weights."""

    def __init__(self) -> None:
        self._is_open = False
        self._queue: list[Task] | None = None

    @contextmanager
    def opened(self, queue: list[Task] | None = None) -> Iterator[None]:
        """Inside the block weight gradients go to `.grad` past autograd: at once, or by tasks appended to `queue`."""
        assert not self._is_open, "a backward runs inside another one's"
        self._is_open, self._queue = True, queue
        try:
            yield
        finally:
            self._is_open, self._queue = False, None

    def way(self, weight: Tensor) -> Way:
        """For a weight that needs a gradient. One with hooks, or that is itself computed, is autograd's."""
        has_hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
        if not self._is_open or not weight.is_leaf or has_hooks:
            return Way.RETURN
        return Way.ADD if self._queue is None else Way.QUEUE

    def hand_in(self, task: Task) -> None:
        """Puts a task off; only where `way` said QUEUE."""
        assert self._queue is not None
        self._queue.append(task)


class WeightGradientLayer(nn.Module):
    """A layer whose weight's gradient goes where its `weight_gradients` says; its own is never opened."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_gradients = WeightGradients()


def share(module: nn.Module, weight_gradients: WeightGradients) -> None:
    """Makes all layers of a module look at one `WeightGradients`."""
    for layer in module.modules():
        if isinstance(layer, WeightGradientLayer):
            layer.weight_gradients = weight_gradients


@torch.no_grad()
def add_product(weight: Tensor, left_OT: Tensor, right_TI: Tensor) -> None:
    """Adds the matrix product, in the shape of the weight, to the weight's `.grad`. O rows, T tokens, I columns."""
    grad = weight.grad
    if grad is None:
        weight.grad = left_OT.mm(right_TI).view(weight.shape).to(weight.dtype)
    elif grad.dtype == left_OT.dtype and grad.is_contiguous():
        grad.view(left_OT.shape[0], right_TI.shape[1]).addmm_(left_OT, right_TI)
    else:
        grad.add_(left_OT.mm(right_TI).view(weight.shape))
