"""Differentiable collectives that run while a rank computes, and collectives over tokens in unequal numbers.

`start` starts a collective and `AsyncTensor.wait` ends it. In backward the gradient's collective starts where forward
waited and is waited for where forward started, so what is computed in between hides the message in both directions.

    name              forward                              backward (`docs/comm.md`, algebra of collectives)
    all_to_all_v      all-to-all with unequal splits       all-to-all with the splits swapped
    all_gather_v      all-gather of unequal shards         reduce-scatter into unequal shards
    reduce_scatter_v  reduce-scatter into unequal shards   all-gather of unequal shards

R tokens in, S tokens out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.comm import collectives
from lightning_megatron.comm.collectives import Pending
from lightning_megatron.mesh import Axis

Collective = Callable[[Tensor], Pending]
"""Starts a collective over a tensor."""


YieldToPeer = Callable[[], None]
"""Lets another microbatch compute before this one waits."""


def no_op() -> None:
    """Does nothing: no other microbatch runs concurrently."""


class AsyncTensor:
    """A tensor in flight. `wait` must be called once and its result used: only then do gradients come back."""

    def __init__(self, forward: Collective, backward: Collective, yield_to_peer: YieldToPeer) -> None:
        self.forward, self.backward, self.yield_to_peer = forward, backward, yield_to_peer
        # The collective in flight, in either direction.
        self.pending: Pending | None = None
        # An empty tensor that joins the two ends in autograd's graph; the tensor in flight stays out of the graph.
        self.ticket: Tensor | None = None

    @property
    def is_complete(self) -> bool:
        """Whether there is no message to wait for, as over an axis of one rank."""
        return self.pending is not None and self.pending.work is None

    def wait(self) -> Tensor:
        """The result of the collective, once it is complete."""
        assert self.ticket is not None, "it was waited for already"
        ticket, self.ticket = self.ticket, None
        result: Tensor = _Wait.apply(ticket, self)
        return result

    def result(self) -> Tensor:
        """The result in either direction, outside of autograd's graph, once it is complete."""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        if pending.work is not None:
            self.yield_to_peer()
        return pending.wait()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, in_flight: AsyncTensor) -> Tensor:
        ctx.in_flight = in_flight
        in_flight.pending = in_flight.forward(x.detach())
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ticket_grad: Tensor) -> tuple[Tensor, None]:
        return ctx.in_flight.result(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, in_flight: AsyncTensor) -> Tensor:
        ctx.in_flight = in_flight
        result = in_flight.result()
        return result.view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.in_flight.pending = ctx.in_flight.backward(grad.contiguous())
        return grad.new_empty(0), None


def start(x: Tensor, forward: Collective, backward: Collective, yield_to_peer: YieldToPeer = no_op) -> AsyncTensor:
    """The result of the collective `forward` on `x`, in flight; its gradient goes through `backward`, the conjugate.

    `yield_to_peer` is called before each wait for a message, so that another microbatch may compute meanwhile.
    """
    in_flight = AsyncTensor(forward, backward, yield_to_peer)
    in_flight.ticket = _Start.apply(x, in_flight)
    return in_flight


def all_to_all_v(
    x_R: Tensor, axis: Axis, given: Sequence[int], taken: Sequence[int], yield_to_peer: YieldToPeer = no_op
) -> AsyncTensor:
    """Shard to shard with unequal splits: `given[i]` tokens go to rank i, `taken[i]` come from it."""
    return start(
        x_R,
        lambda x: collectives.all_to_all_v(x, axis, given, taken, wait=False),
        lambda grad: collectives.all_to_all_v(grad, axis, taken, given, wait=False),
        yield_to_peer,
    )


def all_gather_v(x_R: Tensor, axis: Axis, counts: Sequence[int], yield_to_peer: YieldToPeer = no_op) -> AsyncTensor:
    """Shard to replicate with unequal shards: rank i has `counts[i]` tokens; gradients are reduce-scattered."""
    return start(
        x_R, lambda x: _all_gather(x, axis, counts), lambda grad: _reduce_scatter(grad, axis, counts), yield_to_peer
    )


def reduce_scatter_v(x_S: Tensor, axis: Axis, counts: Sequence[int], yield_to_peer: YieldToPeer = no_op) -> AsyncTensor:
    """Partial to shard: this rank's `counts[axis.rank]` tokens of the sum over the axis; gradients are all-gathered."""
    return start(
        x_S, lambda x: _reduce_scatter(x, axis, counts), lambda grad: _all_gather(grad, axis, counts), yield_to_peer
    )


def _all_gather(x: Tensor, axis: Axis, counts: Sequence[int]) -> Pending:
    # An all-gather of unequal shards is an all-to-all in which each rank gives all it has to every other.
    copies = x.expand(axis.size, *x.shape).flatten(0, 1)
    return collectives.all_to_all_v(copies, axis, [len(x)] * axis.size, counts, wait=False)


def _reduce_scatter(x: Tensor, axis: Axis, counts: Sequence[int]) -> Pending:
    own = counts[axis.rank]
    pending = collectives.all_to_all_v(x, axis, counts, [own] * axis.size, wait=False)
    if axis.size > 1:
        pending.finish = lambda parts: parts.view(axis.size, own, *x.shape[1:]).sum(0)
    return pending
