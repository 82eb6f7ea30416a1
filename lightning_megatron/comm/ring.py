"""Ring communication: each rank of an axis sends to the next, the last to the first."""

from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm.collectives import Pending, group_of, group_rank
from lightning_megatron.mesh import Axis


@overload
def pass_on(x: Tensor, axis: Axis, *, wait: Literal[True] = True) -> Tensor: ...
@overload
def pass_on(x: Tensor, axis: Axis, *, wait: Literal[False]) -> Pending: ...
def pass_on(x: Tensor, axis: Axis, *, wait: bool = True) -> Tensor | Pending:
    """The tensor of the rank before this one, while `x` is sent to the rank after it. `x` must be contiguous, of one
    shape on all ranks, and unchanged until the wait."""
    if axis.size == 1:
        return x if wait else Pending(x)
    received, group = torch.empty_like(x), group_of(axis)
    after, before = (group_rank(axis, (axis.rank + step) % axis.size) for step in (1, -1))
    # As one batch, because NCCL runs the messages of two ranks in order, and in a ring all would send first.
    messages = [
        dist.P2POp(dist.isend, x.detach(), group=group, group_peer=after),
        dist.P2POp(dist.irecv, received, group=group, group_peer=before),
    ]
    first, *others = dist.batch_isend_irecv(messages)

    def finish(landed: Tensor) -> Tensor:
        for work in others:
            work.wait()
        # They keep the tensor that is sent alive until here.
        messages.clear()
        return landed

    pending = Pending(received, first, finish)
    return pending.wait() if wait else pending
