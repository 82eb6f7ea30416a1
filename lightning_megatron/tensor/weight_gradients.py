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

Task = tuple[Tensor, Callable[[], None]]
"""A weight, and what adds its gradient from one microbatch to its `.grad`."""


def _nowhere(weight: Tensor) -> None:
    return None


class Way(Enum):
    """What a linear does with the gradient of its weight."""

    RETURN = "return it to autograd"
    ADD = "add it to `.grad` now"
    QUEUE = "hand in a task that adds it"


class WeightGradients:
    """Where the linears of a model learn what to do with the gradients of their weights.

    `grad_view` tells where the first gradient of a step goes, if it shall not be a tensor of its own.
    """

    def __init__(self, grad_view: Callable[[Tensor], Tensor | None] = _nowhere) -> None:
        self.grad_view = grad_view
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

    def hand_in(self, weight: Tensor, task: Callable[[], None]) -> None:
        """Puts a task off; only where `way` said QUEUE."""
        assert self._queue is not None
        self._queue.append((weight, task))

    @torch.no_grad()
    def add_rows(self, weight: Tensor, place_T: Tensor, rows_TI: Tensor) -> None:
        """Adds each row to the row of the weight's `.grad` that `place_T` says; several may go to one.

        In no fixed order on a GPU.
        """
        grad = weight.grad
        if grad is None:
            grad_view = self.grad_view(weight)
            grad = weight.grad = torch.zeros_like(weight) if grad_view is None else grad_view.zero_()
        grad.index_add_(0, place_T, rows_TI.to(grad.dtype))


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
def add_product(weight: Tensor, left_OT: Tensor, right_TI: Tensor, grad_view: Tensor | None) -> None:
    """Adds the matrix product, in the shape of the weight, to the weight's `.grad`, which is made at `grad_view` where
    there is none yet. O rows, T tokens, I columns."""
    grad, shape = weight.grad, (left_OT.shape[0], right_TI.shape[1])
    if grad is None and grad_view is None:
        weight.grad = left_OT.mm(right_TI).view(weight.shape).to(weight.dtype)
    elif grad is None:
        assert grad_view is not None
        if grad_view.dtype == left_OT.dtype:
            torch.mm(left_OT, right_TI, out=grad_view.view(shape))
        else:
            grad_view.view(shape).copy_(left_OT.mm(right_TI))
        weight.grad = grad_view
    elif grad.dtype == left_OT.dtype and grad.is_contiguous():
        grad.view(shape).addmm_(left_OT, right_TI)
    else:
        grad.add_(left_OT.mm(right_TI).view(weight.shape))
