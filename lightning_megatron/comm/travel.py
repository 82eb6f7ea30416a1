"""Tensors that are on their way while a rank does other things, and rows that ranks have in unequal numbers.

`depart` starts a collective and `Travelling.wait` ends it; in the backward the gradient departs where the forward
waited and is awaited where the forward departed. What is computed in between hides the message, in both directions.

    name             forward                                backward
    exchange_rows    rows for each rank, rows of each       the rows' gradients the other way
    gather_rows      rows of all ranks, joined              own rows' gradients, summed over the axis
    scatter_rows     own rows, summed over the axis         the rows' gradients of all ranks, joined

R rows in, S rows out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.comm import collectives
from lightning_megatron.comm.collectives import Pending
from lightning_megatron.mesh import Axis

Start = Callable[[Tensor], Pending]
"""Starts a collective over a tensor."""


GiveWay = Callable[[], None]
"""Lets others compute before this one waits."""


def not_at_all() -> None:
    """Nobody else is there to compute."""


class Travelling:
    """A tensor on its way. `wait` once, and use what it gives: only then do gradients come back."""

    def __init__(self, there: Start, back: Start, give_way: GiveWay) -> None:
        self.there, self.back, self.give_way = there, back, give_way
        # In flight, in either direction.
        self.pending: Pending | None = None
        # An empty tensor that ties the two ends together in autograd's graph; what has not landed stays out of it.
        self.ticket: Tensor | None = None

    @property
    def is_here(self) -> bool:
        """Whether there is no message to wait for, as over an axis of one rank."""
        return self.pending is not None and self.pending.work is None

    def wait(self) -> Tensor:
        """The tensor, once it has landed."""
        assert self.ticket is not None, "it was waited for already"
        ticket, self.ticket = self.ticket, None
        landed: Tensor = _Land.apply(ticket, self)
        return landed

    def land(self) -> Tensor:
        """What is in flight, once it has landed."""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        if pending.work is not None:
            self.give_way()
        return pending.wait()


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, travelling: Travelling) -> Tensor:
        ctx.travelling = travelling
        travelling.pending = travelling.there(x.detach())
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ticket_grad: Tensor) -> tuple[Tensor, None]:
        return ctx.travelling.land(), None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, travelling: Travelling) -> Tensor:
        ctx.travelling = travelling
        landed = travelling.land()
        return landed.view_as(landed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.travelling.pending = ctx.travelling.back(grad.contiguous())
        return grad.new_empty(0), None


def depart(x: Tensor, there: Start, back: Start, give_way: GiveWay = not_at_all) -> Travelling:
    """`x` on its way by the collective `there`; its gradient comes by `back`, the conjugate.

    `give_way` is called before each wait for a message: what else there is to do may be done then.
    """
    travelling = Travelling(there, back, give_way)
    travelling.ticket = _Depart.apply(x, travelling)
    return travelling


def exchange_rows(
    x_R: Tensor, axis: Axis, given: Sequence[int], taken: Sequence[int], give_way: GiveWay = not_at_all
) -> Travelling:
    """The rows that the ranks of the axis have for this one: `given[i]` rows go to rank i, `taken[i]` come from it."""
    return depart(
        x_R,
        lambda x: collectives.all_to_all_rows(x, axis, given, taken, wait=False),
        lambda grad: collectives.all_to_all_rows(grad, axis, taken, given, wait=False),
        give_way,
    )


def gather_rows(x_R: Tensor, axis: Axis, counts: Sequence[int], give_way: GiveWay = not_at_all) -> Travelling:
    """The rows of all ranks joined, of which rank i has `counts[i]`; gradients are summed and scattered."""
    return depart(x_R, lambda x: _joined(x, axis, counts), lambda grad: _own_of_sum(grad, axis, counts), give_way)


def scatter_rows(x_S: Tensor, axis: Axis, counts: Sequence[int], give_way: GiveWay = not_at_all) -> Travelling:
    """This rank's `counts[axis.rank]` rows of the sum over the axis; gradients are joined."""
    return depart(x_S, lambda x: _own_of_sum(x, axis, counts), lambda grad: _joined(grad, axis, counts), give_way)


def _joined(x: Tensor, axis: Axis, counts: Sequence[int]) -> Pending:
    # A gather of unequal shares is an exchange in which each rank gives all it has to every other.
    copies = x.expand(axis.size, *x.shape).flatten(0, 1)
    return collectives.all_to_all_rows(copies, axis, [len(x)] * axis.size, counts, wait=False)


def _own_of_sum(x: Tensor, axis: Axis, counts: Sequence[int]) -> Pending:
    own = counts[axis.rank]
    pending = collectives.all_to_all_rows(x, axis, counts, [own] * axis.size, wait=False)
    if axis.size > 1:
        pending.finish = lambda parts: parts.view(axis.size, own, *x.shape[1:]).sum(0)
    return pending
