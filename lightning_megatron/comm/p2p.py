"""Point-to-point messages between the ranks of one axis: posted without waiting, waited for when needed, no tags.

Messages match by order alone, as NCCL matches them, within a lane: one direction between two ranks, for one purpose,
with a process group of its own. A receive posted early, or a send that waits for its receiver, thus holds up only
later messages of its own lane.

    lane       carries
    header     shapes and dtypes of each forward message, on the host
    payload    forward messages of the expected shape
    resent     forward messages of any other shape
    gradient   backward messages, which have the shapes of the forward messages

Note: expected shapes. Both ends of a hop know the messages of the last run. If all were of one shape they expect it
again, and the receiver posts its receive before it has read the header. A message of another shape goes by the resent
lane, after its header, and a dummy of the expected shape goes to the receive that was posted for it.
"""

import json
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh import Axis, NewGroup

Payload = Tensor | dict[str, Tensor]
"""Activations or gradients that are sent between stages."""

Hop = tuple[int, int]
"""The ranks on the axis that forward messages go from and to."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
_HEADER_BYTES = 1024
# Alignment of each tensor within a packed message.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Names, shapes and dtypes of a payload's tensors (its metadata); a single tensor has no name."""

    entries: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    is_mapping: bool

    @staticmethod
    def of(payload: Payload) -> "TensorMeta":
        """The metadata of a payload. Raises ValueError for one that cannot be sent."""
        tensors = payload if isinstance(payload, dict) else {"": payload}
        if not tensors:
            raise ValueError("a stage hands an empty dict to the next; it must hand at least one tensor")
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES:
                what = f"a tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
                under = f" under {name!r}" if isinstance(payload, dict) else ""
                raise ValueError(
                    f"a stage hands {what}{under} to the next; it may hand a tensor or a dict of named tensors, of "
                    f"{', '.join(map(str, _DTYPES))}"
                )
        entries = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
        return TensorMeta(entries, isinstance(payload, dict))

    def of_gradient(self) -> "TensorMeta":
        """The metadata of the gradients: of the floating-point tensors of a dict, or of the single tensor."""
        if not self.is_mapping:
            return self
        return TensorMeta(tuple(entry for entry in self.entries if entry[2].is_floating_point), True)

    def empty(self, device: torch.device) -> Tensor:
        """An empty buffer for a packed payload."""
        if not self.is_mapping:
            _, shape, dtype = self.entries[0]
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.empty(sum(_padded(entry) for entry in self.entries), dtype=torch.uint8, device=device)

    def pack(self, payload: Payload) -> Tensor:
        """The payload as one contiguous tensor; a single tensor is not copied."""
        if isinstance(payload, Tensor):
            return payload.detach().contiguous()
        parts = []
        for entry in self.entries:
            data = payload[entry[0]].detach().contiguous().reshape(-1).view(torch.uint8)
            parts += [data, data.new_zeros(_padded(entry) - data.numel())]
        return torch.cat(parts)

    def unpack(self, buffer: Tensor) -> Payload:
        """The payload in a packed buffer, with which its tensors share memory."""
        if not self.is_mapping:
            return buffer
        tensors, start = {}, 0
        for name, shape, dtype in self.entries:
            length = torch.Size(shape).numel() * dtype.itemsize
            tensors[name] = buffer[start : start + length].view(dtype).view(shape)
            start += _padded((name, shape, dtype))
        return tensors


def _padded(entry: tuple[str, tuple[int, ...], torch.dtype]) -> int:
    length = torch.Size(entry[1]).numel() * entry[2].itemsize
    return -(-length // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@lru_cache(maxsize=256)
def _encoded(like: TensorMeta) -> bytes:
    entries = [[name, shape, _DTYPES.index(dtype)] for name, shape, dtype in like.entries]
    text = json.dumps([like.is_mapping, entries]).encode()
    if len(text) > _HEADER_BYTES:
        raise ValueError(
            f"the names and shapes of what a stage hands to the next take {len(text)} bytes; they may take "
            f"{_HEADER_BYTES}: hand fewer tensors, or shorter names"
        )
    return text.ljust(_HEADER_BYTES)


@lru_cache(maxsize=256)
def _decoded(header: bytes) -> TensorMeta:
    is_mapping, entries = json.loads(header)
    return TensorMeta(tuple((name, tuple(shape), _DTYPES[dtype]) for name, shape, dtype in entries), is_mapping)


@dataclass(frozen=True)
class LaneGroups:
    """The process groups of one hop, each of its two ranks."""

    header: dist.ProcessGroup
    payload: dist.ProcessGroup
    resent: dist.ProcessGroup
    gradient: dist.ProcessGroup


def build_lanes(
    axis: Axis, hops: Sequence[Hop], new_group: NewGroup, new_host_group: NewGroup
) -> dict[Hop, LaneGroups]:
    """Process groups of the hops of this rank; `new_host_group` makes groups for tensors on the host.

    Every rank of the world makes equally many groups, and the two ranks of a hop make theirs at the same turn: torch
    names a group by how many its rank has made, and ranks that disagree about a name wait for ever. With NCCL each is
    a split of the world's communicator, which all ranks must enter.
    """
    lanes: dict[Hop, LaneGroups] = {}
    for turn in _turns(hops):
        own = next((hop for hop in turn if axis.rank in hop), None)
        ranks = tuple(sorted(axis.ranks[rank] for rank in (own or (axis.rank,))))
        groups = [make(ranks) for make in (new_host_group, new_group, new_group, new_group)]
        if own is not None:
            lanes[own] = LaneGroups(*groups)  # type: ignore[arg-type]
    return lanes


def connect_lanes(axis: Axis, lanes: Mapping[Hop, LaneGroups], device: torch.device) -> None:
    """Sends one byte over every device lane of this rank, in the lane's direction. All ranks of the axis take part.

    NCCL connects two ranks by their first message and holds up the host until both have posted it. A schedule posts
    receives ahead of their sends, so that ranks would wait for each other in a circle. Here they meet pair by pair, in
    the order in which their groups were made.
    """
    for hop, groups in lanes.items():
        is_first = axis.rank == hop[0]
        peer_rank = int(axis.ranks[hop[is_first]] > axis.ranks[axis.rank])
        for group, is_sender in (
            (groups.payload, is_first),
            (groups.resent, is_first),
            (groups.gradient, not is_first),
        ):
            byte = torch.zeros(1, dtype=torch.uint8, device=device)
            if is_sender:
                dist.send(byte, group=group, group_dst=peer_rank)
            else:
                dist.recv(byte, group=group, group_src=peer_rank)


def _turns(hops: Sequence[Hop]) -> list[list[Hop]]:
    """The hops in rounds of which no rank is in two hops."""
    turns: list[list[Hop]] = []
    for hop in hops:
        turn = next((t for t in turns if not any(set(hop) & set(other) for other in t)), None)
        if turn is None:
            turns.append(turn := [])
        turn.append(hop)
    return turns


@dataclass
class _Incoming:
    """A forward message that is being received."""

    header: Tensor
    header_work: dist.Work
    buffer: Tensor | None = None
    work: dist.Work | None = None
    like: TensorMeta | None = None
    """Metadata, once the header is read."""


@dataclass
class _Hop:
    """The state that both ends of a hop know alike."""

    expected: TensorMeta | None = None
    seen: set[TensorMeta] = field(default_factory=set)
    unread: deque[_Incoming] = field(default_factory=deque)


class Mailbox:
    """This rank's end of the lanes of an axis. The caller chooses the keys of messages."""

    def __init__(self, axis: Axis, lanes: Mapping[Hop, LaneGroups], device: torch.device) -> None:
        self._axis = axis
        self._lanes = lanes
        self._device = device
        self._hops: defaultdict[Hop, _Hop] = defaultdict(_Hop)
        self._sending: dict[Hashable, list[tuple[dist.Work, Tensor]]] = {}
        self._incoming: dict[Hashable, tuple[Hop, _Incoming]] = {}
        self._gradients: dict[Hashable, tuple[TensorMeta, Tensor, dist.Work]] = {}
        self._fillers: list[tuple[dist.Work, Tensor]] = []

    def send_forward(self, key: Hashable, to: int, payload: Payload) -> None:
        """Posts a message to the rank `to` on the axis; its memory is held until `release` or `finish`."""
        hop, like = (self._axis.rank, to), TensorMeta.of(payload)
        groups, state = self._lanes[hop], self._hops[hop]
        header = torch.frombuffer(bytearray(_encoded(like)), dtype=torch.uint8)
        messages = [(groups.header, header)]
        if like == state.expected:
            messages.append((groups.payload, like.pack(payload)))
        else:
            if state.expected is not None:
                messages.append((groups.payload, state.expected.empty(self._device)))
            messages.append((groups.resent, like.pack(payload)))
        state.seen.add(like)
        self._sending[key] = [(self._post(dist.isend, data, group, to), data) for group, data in messages]

    def receive_forward(self, key: Hashable, source: int) -> None:
        """Posts the receive of a message from the rank `source` on the axis."""
        hop = (source, self._axis.rank)
        groups, state = self._lanes[hop], self._hops[hop]
        header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        incoming = _Incoming(header, self._post(dist.irecv, header, groups.header, source))
        if state.expected is not None:
            incoming.buffer = state.expected.empty(self._device)
            incoming.work = self._post(dist.irecv, incoming.buffer, groups.payload, source)
        state.unread.append(incoming)
        self._incoming[key] = (hop, incoming)

    def send_backward(self, key: Hashable, to: int, payload: Payload) -> None:
        """Posts a gradient, whose shapes its receiver knows."""
        data = TensorMeta.of(payload).pack(payload)
        group = self._lanes[to, self._axis.rank].gradient
        self._sending[key] = [(self._post(dist.isend, data, group, to), data)]

    def receive_backward(self, key: Hashable, source: int, like: TensorMeta) -> None:
        """Posts the receive of a gradient of known shapes."""
        buffer = like.empty(self._device)
        group = self._lanes[self._axis.rank, source].gradient
        self._gradients[key] = (like, buffer, self._post(dist.irecv, buffer, group, source))

    def wait(self, key: Hashable) -> Payload:
        """The received payload, once it is complete."""
        if key in self._gradients:
            like, buffer, work = self._gradients.pop(key)
            work.wait()
            return like.unpack(buffer)
        hop, incoming = self._incoming.pop(key)
        while incoming.like is None:
            # In order, because an earlier message of the resent lane comes before this one.
            self._read(hop, self._hops[hop].unread.popleft())
        assert incoming.work is not None and incoming.buffer is not None
        incoming.work.wait()
        return incoming.like.unpack(incoming.buffer)

    def release(self, key: Hashable) -> None:
        """Waits until a message is sent, and frees its memory."""
        for work, _ in self._sending.pop(key):
            work.wait()

    def finish(self) -> None:
        """Ends a run: waits until all messages are sent, after which both ends of a hop expect the same shapes."""
        for key in list(self._sending):
            self.release(key)
        for work, _ in self._fillers:
            work.wait()
        self._fillers.clear()
        assert not self._incoming and not self._gradients, "a message was received and never waited for"
        for state in self._hops.values():
            if state.seen:
                state.expected = next(iter(state.seen)) if len(state.seen) == 1 else None
                state.seen.clear()

    def _read(self, hop: Hop, incoming: _Incoming) -> None:
        """Reads a header, and posts the receive of a message that is not of the expected shape."""
        state = self._hops[hop]
        incoming.header_work.wait()
        incoming.like = like = _decoded(incoming.header.numpy().tobytes())
        state.seen.add(like)
        if like == state.expected:
            return
        if incoming.work is not None and incoming.buffer is not None:
            self._fillers.append((incoming.work, incoming.buffer))
        incoming.buffer = like.empty(self._device)
        incoming.work = self._post(dist.irecv, incoming.buffer, self._lanes[hop].resent, hop[0])

    def _post(
        self, start: Callable[..., dist.Work | None], data: Tensor, group: dist.ProcessGroup, peer: int
    ) -> dist.Work:
        """Starts a message with the rank `peer` on the axis, the other member of the group."""
        peer_rank = int(self._axis.ranks[peer] > self._axis.ranks[self._axis.rank])
        work = start(data, group=group, **{"group_dst" if start is dist.isend else "group_src": peer_rank})
        assert work is not None
        return work
