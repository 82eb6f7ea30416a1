"""Weight gradients (wgrad) of linears apart from input gradients (dgrad): accumulated in place, or deferred.

Autograd computes both at once, allocates a weight gradient for every microbatch and adds it to `.grad`. A schedule that
owns the backward can do better: the GEMM accumulates into `.grad`, or, where the backward is split into dgrad and
wgrad, waits in a queue. Whoever runs the backward opens a `WeightGradients` for its duration, at which the linears
look; while it is closed they return gradients to autograd.

Source: Qi et al., arXiv 2401.10241, section 3 (splitting the backward).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor, nn

Task = tuple[Tensor, Callable[[], None]]
"""A weight, and a function that adds its gradient of one microbatch to its `.grad`."""

StandIn = tuple[Tensor, Tensor]
"""An anchor [] that compiled code differentiates in place of a weight, and the handle of that weight."""


def _nowhere(weight: Tensor) -> None:
    return None


class WeightGradientMode(Enum):
    """What a linear does with its weight gradient."""

    RETURN = "return it to autograd"
    ADD = "add it to `.grad` now"
    DEFER = "hand in a task that adds it"


class WeightGradients:
    """Tells the linears of a model what to do with their weight gradients.

    `grad_view` gives the memory for the first gradient of a step, or None for a tensor of its own.
    """

    def __init__(self, grad_view: Callable[[Tensor], Tensor | None] = _nowhere) -> None:
        self.grad_view = grad_view
        self._is_open = False
        self._queue: list[Task] | None = None

    def __reduce__(self) -> tuple[type["WeightGradients"], tuple[()]]:
        # The memory is of the fit of one model: a copy of that model runs in none.
        return WeightGradients, ()

    @contextmanager
    def opened(self, queue: list[Task] | None = None) -> Iterator[None]:
        """Inside the block weight gradients bypass autograd: added to `.grad` at once, or by tasks put in `queue`."""
        assert not self._is_open, "a backward runs inside another one's"
        self._is_open, self._queue = True, queue
        try:
            yield
        finally:
            self._is_open, self._queue = False, None

    @property
    def is_open(self) -> bool:
        """Whether a backward runs of those that the strategy runs."""
        return self._is_open

    def mode(self, weight: Tensor) -> WeightGradientMode:
        """Mode for a weight that needs a gradient. One with hooks, or that is itself computed, is left to autograd, as
        are those of compiled code without a stand-in: a backward is compiled before it is known when it runs."""
        if torch.compiler.is_compiling():
            return WeightGradientMode.RETURN
        if not self._is_open or not weight.is_leaf or has_gradient_hooks(weight):
            return WeightGradientMode.RETURN
        return WeightGradientMode.ADD if self._queue is None else WeightGradientMode.DEFER

    def defer(self, weight: Tensor, task: Callable[[], None]) -> None:
        """Defers a task; only where `mode` is DEFER."""
        assert self._queue is not None
        self._queue.append((weight, task))

    @torch.no_grad()
    def add_rows(self, weight: Tensor, index_T: Tensor, rows_TI: Tensor) -> None:
        """Adds each row to row `index_T` of the weight's `.grad`; indices may repeat.

        The order of additions is not fixed on a GPU.
        """
        grad = weight.grad
        if grad is None:
            grad_view = self.grad_view(weight)
            grad = weight.grad = torch.zeros_like(weight) if grad_view is None else grad_view.zero_()
        grad.index_add_(0, index_T, rows_TI.to(grad.dtype))


def has_gradient_hooks(weight: Tensor) -> bool:
    """Whether code of others runs on a weight's gradient, where autograd has it."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


class WeightGradientLayer(nn.Module):
    """A layer whose weight gradient goes where its `weight_gradients` says; the default is never opened."""

    names_stood_in: tuple[str, ...] = ()
    """Names of the weights that may have stand-ins."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_gradients = WeightGradients()
        self.stand_ins: dict[str, StandIn] = {}
        """Stand-ins of weights, by their names, in compiled calls (`tensor.compiled_gradients`)."""


def share(module: nn.Module, weight_gradients: WeightGradients) -> None:
    """Makes all layers of a module use one `WeightGradients`."""
    for layer in module.modules():
        if isinstance(layer, WeightGradientLayer):
            layer.weight_gradients = weight_gradients


@torch.no_grad()
def add_gradient(weight: Tensor, grad: Tensor, grad_view: Tensor | None) -> None:
    """Adds a gradient of any dtype, as large as the weight, to its `.grad`, which is made at `grad_view` where there is
    none yet."""
    grad = grad.view(weight.shape)
    if weight.grad is not None:
        weight.grad.add_(grad)
    elif grad_view is None:
        weight.grad = grad.to(_gradient_dtype(weight))
    else:
        weight.grad = grad_view.copy_(grad)


@torch.no_grad()
def add_product(weight: Tensor, left_OT: Tensor, right_TI: Tensor, grad_view: Tensor | None) -> None:
    """Adds the matrix product, in the shape of the weight, to the weight's `.grad`, which is made at `grad_view` where
    there is none yet. O rows, T tokens, I columns."""
    grad, shape = weight.grad, (left_OT.shape[0], right_TI.shape[1])
    if grad is None and grad_view is None:
        weight.grad = product_in(_gradient_dtype(weight), left_OT, right_TI).view(weight.shape)
    elif grad is None:
        assert grad_view is not None
        view = grad_view.view(shape)
        if grad_view.dtype == left_OT.dtype:
            torch.mm(left_OT, right_TI, out=view)
        elif _is_wide(grad_view.dtype, left_OT):
            torch.mm(left_OT, right_TI, out_dtype=grad_view.dtype, out=view)
        else:
            view.copy_(left_OT.mm(right_TI))
        weight.grad = grad_view
    elif grad.dtype == left_OT.dtype and grad.is_contiguous():
        grad.view(shape).addmm_(left_OT, right_TI)
    elif _is_wide(grad.dtype, left_OT) and grad.is_contiguous():
        view = grad.view(shape)
        torch.addmm(view, left_OT, right_TI, out_dtype=grad.dtype, out=view)
    else:
        grad.add_(left_OT.mm(right_TI).view(weight.shape))


def _gradient_dtype(weight: Tensor) -> torch.dtype:
    # A parameter's gradients may be wider than itself.
    return weight.dtype if weight.grad_dtype is None else weight.grad_dtype


def product_in(dtype: torch.dtype, left_OT: Tensor, right_TI: Tensor) -> Tensor:
    """The matrix product in `dtype`, [O, I]."""
    if _is_wide(dtype, left_OT):
        return torch.mm(left_OT, right_TI, out_dtype=dtype)
    return left_OT.mm(right_TI).to(dtype)


def _is_wide(dtype: torch.dtype, factor: Tensor) -> bool:
    """Whether a kernel takes factors in 16 bits and gives float32, in which it adds up: a CPU has none."""
    is_low = factor.dtype in (torch.bfloat16, torch.float16)
    return is_low and dtype is torch.float32 and factor.device.type in ("cuda", "meta")
