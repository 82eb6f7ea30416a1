"""The other ranks of a dry run: process groups that send nothing, and pipeline neighbours that answer with empty
tensors of the right shapes.

Each message is counted under its axis and its kind.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm.p2p import Mailbox, Payload, TensorMeta
from lightning_megatron.mesh import Axis, Mesh, NewGroup, Sizes
from lightning_megatron.pipeline.schedule import Action

# Messages count under the first of several axes with equal ranks; axes that no step uses come last.
_NAMES = ("tp", "cp", "dp+cp", "dp", "ep", "etp", "edp", "pp", "cp_ring", "cp_ulysses", "pp+tp", "pp+cp+tp", "world")

# Some of the pipeline ranks share a tied weight.
_TIED = "tied stages"


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Messages of one kind over one axis."""

    number: int = 0
    tensor_bytes: float = 0.0
    """Bytes of their tensors: the output of an all-gather, the input of any other collective."""
    sent_bytes: float = 0.0
    """Least bytes that this rank sends: (n - 1)/n of the tensor for n ranks, twice that for an all-reduce."""

    def __add__(self, other: "Messages") -> "Messages":
        return Messages(
            number=self.number + other.number,
            tensor_bytes=self.tensor_bytes + other.tensor_bytes,
            sent_bytes=self.sent_bytes + other.sent_bytes,
        )

    def __mul__(self, factor: int) -> "Messages":
        return Messages(
            number=self.number * factor,
            tensor_bytes=self.tensor_bytes * factor,
            sent_bytes=self.sent_bytes * factor,
        )


MessageCounts = Mapping[tuple[str, str], Messages]
"""Messages by axis and kind."""


class Ledger:
    """Counts of messages since they were last taken."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], Messages] = {}

    def add(self, axis: str, kind: str, tensor_bytes: float, share: float) -> None:
        """Counts one message; this rank sends `share` of its bytes."""
        message = Messages(number=1, tensor_bytes=tensor_bytes, sent_bytes=tensor_bytes * share)
        self._counts[axis, kind] = self._counts.get((axis, kind), Messages()) + message

    def take(self) -> MessageCounts:
        """The counts, which begin anew."""
        counts, self._counts = self._counts, {}
        return counts


class _Done(dist.Work):
    """A collective that is complete when it begins."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class HostMessages:
    """Numbers of the host that the last stage broadcasts, which describe its outputs.

    Other ranks run after it, and get them in the order in which it sent them.
    """

    def __init__(self) -> None:
        self._sent: list[Tensor] = []
        self._next = 0

    def rewind(self) -> None:
        """Begins anew, for another rank."""
        self._next = 0

    def pass_on(self, tensor: Tensor, *, is_source: bool) -> None:
        """Notes what is sent, and overwrites what is received."""
        if is_source:
            self._sent[self._next :] = [tensor.clone()]
        else:
            tensor.copy_(self._sent[self._next])
        self._next += 1


class FakeProcessGroup(dist.ProcessGroup):
    """A process group whose only real rank is this one: outputs of collectives have their old values."""

    def __init__(
        self, ranks: tuple[int, ...], rank: int, ledger: Ledger | None, told: "HostMessages | None" = None
    ) -> None:
        super().__init__(ranks.index(rank), len(ranks))  # type: ignore[call-arg]
        self.ranks = ranks
        self._own_rank, self._told = ranks.index(rank), told
        self.axis_name = _TIED
        self._ledger = ledger

    def _count(self, kind: str, tensor: Tensor, *, twice: bool = False) -> _Done:
        if self._ledger is not None:
            others = 1 - 1 / len(self.ranks)
            self._ledger.add(self.axis_name, kind, tensor.numel() * tensor.element_size(), (1 + twice) * others)
        return _Done()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        return self._count("all-reduce", tensors[0], twice=True)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        if self._told is not None and not tensors[0].is_meta:
            self._told.pass_on(tensors[0], is_source=opts.rootRank == self._own_rank)
            return _Done()
        return self._count("broadcast", tensors[0])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> _Done:
        return self._count("all-gather", output)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> _Done:
        return self._count("reduce-scatter", input)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> _Done:
        return self._count("all-to-all", input)

    # The names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> _Done:
        return self._count("send", tensors[0])

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> _Done:
        return _Done()


@contextmanager
def fake_mesh(
    sizes: Sizes, rank: int, ledger: Ledger | None = None, told: HostMessages | None = None
) -> Iterator[tuple[Mesh, NewGroup]]:
    """The mesh of a rank, and a function that makes more process groups; messages go to the ledger, and those of hosts
    are as `told`."""
    # Torch's P2POp translates ranks through this table; nothing else uses these groups.
    table = dist.distributed_c10d._world.pg_group_ranks
    made: list[FakeProcessGroup] = []

    def new_group(ranks: tuple[int, ...]) -> FakeProcessGroup:
        group = FakeProcessGroup(tuple(ranks), rank, ledger, told)
        table[group] = {member: index for index, member in enumerate(ranks)}
        made.append(group)
        return group

    def new_part(ranks: tuple[int, ...]) -> FakeProcessGroup:
        group = new_group(ranks)
        # Some of the ranks of an axis, over which it is divided.
        parents = [name for name in ("dp+cp", "edp") if len(ranks) > 1 and set(ranks) < set(mesh.axis(name).ranks)]
        group.axis_name = parents[0] if parents else group.axis_name
        return group

    try:
        mesh = Mesh.build(sizes, rank, new_group)
        _name_groups(mesh)
        yield mesh, new_part
    finally:
        for group in made:
            del table[group]


def _name_groups(mesh: Mesh) -> None:
    """Gives each group the name of its axis, and both names where an expert axis has the ranks of another."""
    sizes = mesh.sizes
    has_experts = sizes.ep * sizes.etp > 1
    for name in (*_NAMES, *(f"context{size}" for size in sizes.context_groups)):
        group = mesh.axis(name).group
        if not isinstance(group, FakeProcessGroup) or (name in ("ep", "etp", "edp") and not has_experts):
            continue
        if group.axis_name == _TIED:
            group.axis_name = name
        elif name in ("ep", "etp", "edp"):
            group.axis_name += f"={name}"


class FakeMailbox(Mailbox):
    """Pipeline neighbours; `meta_of` describes the tensors that a stage sends to the next for a microbatch.

    `posting` is called before each message is posted, and `releasing` before what is left of sent ones is freed at the
    end of a plan.

    Buffers are allocated when a receive is posted, as in every step but a run's first.
    """

    def __init__(
        self,
        axis: Axis,
        meta_of: Callable[[int, int], TensorMeta],
        device: torch.device,
        ledger: Ledger,
        posting: Callable[[Action], None],
        releasing: Callable[[Action], None],
    ) -> None:
        super().__init__(axis, {}, device)
        self._meta_of, self._ledger, self._posting, self._releasing = meta_of, ledger, posting, releasing
        self._buffers: dict[Hashable, tuple[TensorMeta, Tensor]] = {}
        self._posted: dict[Hashable, Tensor] = {}

    def send_forward(self, key: Hashable, to: int, payload: Payload) -> None:
        assert isinstance(key, Action)
        self._posting(key)
        data = self._posted[key] = TensorMeta.of(payload).pack(payload)
        self._ledger.add("pp", "send", data.numel() * data.element_size(), 1.0)

    send_backward = send_forward

    def receive_forward(self, key: Hashable, source: int) -> None:
        assert isinstance(key, Action)
        self._posting(key)
        meta = self._meta_of(key.stage - 1, key.microbatch)
        self._buffers[key] = meta, meta.empty(self._device)

    def receive_backward(self, key: Hashable, source: int, like: TensorMeta) -> None:
        assert isinstance(key, Action)
        self._posting(key)
        self._buffers[key] = like, like.empty(self._device)

    def wait(self, key: Hashable) -> Payload:
        meta, buffer = self._buffers.pop(key)
        return meta.unpack(buffer)

    def release(self, key: Hashable) -> None:
        del self._posted[key]

    def finish(self) -> None:
        for key in list(self._posted):
            assert isinstance(key, Action)
            self._releasing(key)
            self.release(key)
        assert not self._buffers, "a message was received and never waited for"
