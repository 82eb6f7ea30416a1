"""Messages between ranks of one axis, launched in batches, with no tags.

Two ranks match their messages by order alone, as NCCL does. A tensor whose shape its receiver cannot know travels
behind a small header, so shapes may change from one message to the next; a receiver that knows the shape (a gradient
has that of its activation) says so and no header is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm.collectives import group_of, group_rank
from lightning_megatron.mesh import Axis

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
_MAX_DIMS = 6
_HEADER_LENGTH = 2 + _MAX_DIMS  # dtype, number of dims, dims


@dataclass(frozen=True, slots=True)
class Send:
    """A tensor for the rank at place `to` on the axis."""

    to: int
    tensor: Tensor
    has_header: bool


@dataclass(frozen=True, slots=True)
class Receive:
    """A tensor from the rank at place `source` on the axis: like `like`, or as its header says."""

    source: int
    like: tuple[torch.Size, torch.dtype] | None


class Mailbox:
    """This rank's end of the messages on an axis; keeps what is being sent alive until it has left."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._axis = axis
        self._device = device
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Tensor]:
        """The tensors received, in the order asked for.

        All messages start together; returns when what is received has landed, and leaves what is sent in flight. Waits
        for what earlier exchanges sent before it starts.
        """
        self.finish()
        headers = [torch.empty(_HEADER_LENGTH, dtype=torch.int64, device=self._device) for _ in receives]
        with_header = [i for i, receive in enumerate(receives) if receive.like is None]
        self._launch(
            [(send.to, _header(send.tensor, self._device)) for send in sends if send.has_header],
            [(receives[i].source, headers[i]) for i in with_header],
        )
        landed = []
        for receive, header in zip(receives, headers, strict=True):
            shape, dtype = receive.like if receive.like is not None else _read_header(header)
            landed.append(torch.empty(shape, dtype=dtype, device=self._device))
        self._launch(
            [(send.to, send.tensor.detach().contiguous()) for send in sends],
            [(receive.source, tensor) for receive, tensor in zip(receives, landed, strict=True)],
        )
        return landed

    def finish(self) -> None:
        """Waits until everything sent has left."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def _launch(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> None:
        """Starts all messages as one batch and waits for the receives."""
        group = group_of(self._axis)
        operations = [
            dist.P2POp(function, tensor, group=group, group_peer=group_rank(self._axis, peer))
            for function, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in messages
        ]
        if not operations:
            return
        works = dist.batch_isend_irecv(operations)
        if len(works) < len(operations):
            # NCCL answers for the whole batch at once, and waiting only orders the stream behind it.
            works[0].wait()
            return
        self._sending += [(work, tensor) for work, (_, tensor) in zip(works, sends, strict=False)]
        for work in works[len(sends) :]:
            work.wait()


def _header(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.dim() > _MAX_DIMS or tensor.dtype not in _DTYPES:
        raise ValueError(
            f"a message between stages is a tensor {tuple(tensor.shape)} of {tensor.dtype}; it may have up to "
            f"{_MAX_DIMS} dims and be one of {', '.join(map(str, _DTYPES))}"
        )
    dims = list(tensor.shape) + [0] * (_MAX_DIMS - tensor.dim())
    return torch.tensor([_DTYPES.index(tensor.dtype), tensor.dim(), *dims], dtype=torch.int64, device=device)


def _read_header(header: Tensor) -> tuple[torch.Size, torch.dtype]:
    dtype, num_dims, *dims = header.tolist()
    return torch.Size(dims[:num_dims]), _DTYPES[dtype]
