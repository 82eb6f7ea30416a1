"""The other ranks of an imagined rank: process groups that send nothing, and neighbours on the pipeline that answer
with tensors like those that they would send.

Each message is counted under the axis whose ranks talk, the kind, and the microbatch that it is of.
"""

from collections.abc import Callable, Hashable, Iterator
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

# Of axes with the same ranks the first has its messages; those that no part of a step talks over come last.
_NAMES = ("tp", "cp", "dp+cp", "dp", "ep", "etp", "edp", "pp", "cp_ring", "cp_ulysses", "pp+tp", "pp+cp+tp", "world")

_TIED = "tied stages"
# Pipeline ranks that hold one weight, where these are not all of them.


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Messages of one kind over one axis."""

    number: int = 0
    tensor_bytes: float = 0.0
    """Of what each is about: of a gather what is joined, of a scattered sum what is summed, of an exchange what a rank
    gives."""
    sent_bytes: float = 0.0
    """Bytes that this rank sends at least: (n - 1)/n of the tensor for n ranks, twice that for an all-reduce."""

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


Place = tuple[int, int] | None
"""Batch of a step and microbatch within it; None: the step itself."""


class Ledger:
    """Counts messages; its owner says which microbatch of which batch they are of."""

    def __init__(self) -> None:
        self.batch = 0
        # None for what belongs to the step and to no microbatch.
        self.microbatch: int | None = None
        self.entries: dict[Place, dict[tuple[str, str], Messages]] = {}

    def add(self, axis: str, kind: str, tensor_bytes: float, share: float, microbatch: int | None = None) -> None:
        """One message; `share` of its bytes leave this rank."""
        number = self.microbatch if microbatch is None else microbatch
        entries = self.entries.setdefault(None if number is None else (self.batch, number), {})
        message = Messages(number=1, tensor_bytes=tensor_bytes, sent_bytes=tensor_bytes * share)
        entries[axis, kind] = entries.get((axis, kind), Messages()) + message


class _Done(dist.Work):
    """A collective that has ended when it begins."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class FakeProcessGroup(dist.ProcessGroup):
    """A process group of which this rank alone is real: what comes from the others is whatever was there."""

    def __init__(self, ranks: tuple[int, ...], rank: int, ledger: Ledger | None) -> None:
        super().__init__(ranks.index(rank), len(ranks))  # type: ignore[call-arg]
        self.ranks = ranks
        # That of its axis.
        self.axis_name = _TIED
        self._ledger = ledger

    def _tell(self, kind: str, tensor: Tensor, *, twice: bool = False) -> _Done:
        if self._ledger is not None:
            others = 1 - 1 / len(self.ranks)
            self._ledger.add(self.axis_name, kind, tensor.numel() * tensor.element_size(), (1 + twice) * others)
        return _Done()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        return self._tell("all-reduce", tensors[0], twice=True)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        return self._tell("broadcast", tensors[0])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> _Done:
        return self._tell("all-gather", output)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> _Done:
        return self._tell("reduce-scatter", input)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> _Done:
        return self._tell("all-to-all", input)

    # The names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> _Done:
        return self._tell("send", tensors[0])

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> _Done:
        return _Done()


@contextmanager
def fake_mesh(sizes: Sizes, rank: int, ledger: Ledger | None = None) -> Iterator[tuple[Mesh, NewGroup]]:
    """The mesh as that rank would see it, and what makes more groups of its ranks; messages go to the ledger."""
    # Torch's P2POp translates ranks through this table; nothing else knows of the groups.
    table = dist.distributed_c10d._world.pg_group_ranks
    made: list[FakeProcessGroup] = []

    def new_group(ranks: tuple[int, ...]) -> FakeProcessGroup:
        group = FakeProcessGroup(tuple(ranks), rank, ledger)
        table[group] = {member: place for place, member in enumerate(ranks)}
        made.append(group)
        return group

    try:
        mesh = Mesh.build(sizes, rank, new_group)
        _name_groups(mesh)
        yield mesh, new_group
    finally:
        for group in made:
            del table[group]


def _name_groups(mesh: Mesh) -> None:
    """Gives each group the name of its axis; experts' groups of the ranks of another axis both names."""
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
    """Neighbours on the pipeline that send what `like_of` says: what a stage hands to the next of a microbatch.

    Room for what comes is made when its receive is posted, as in every step but a run's first.
    """

    def __init__(
        self, axis: Axis, like_of: Callable[[int, int], TensorMeta], device: torch.device, ledger: Ledger
    ) -> None:
        super().__init__(axis, {}, device)
        self._like_of, self._ledger = like_of, ledger
        self._buffers: dict[Hashable, tuple[TensorMeta, Tensor]] = {}
        self._posted: dict[Hashable, Tensor] = {}

    def _post_send(self, key: Hashable, payload: Payload) -> None:
        assert isinstance(key, Action)
        data = self._posted[key] = TensorMeta.of(payload).pack(payload)
        self._ledger.add("pp", "send", data.numel() * data.element_size(), 1.0, key.microbatch)

    def send_forward(self, key: Hashable, to: int, payload: Payload) -> None:
        self._post_send(key, payload)

    def send_backward(self, key: Hashable, to: int, payload: Payload) -> None:
        self._post_send(key, payload)

    def receive_forward(self, key: Hashable, source: int) -> None:
        assert isinstance(key, Action)
        like = self._like_of(key.stage - 1, key.microbatch)
        self._buffers[key] = like, like.empty(self._device)

    def receive_backward(self, key: Hashable, source: int, like: TensorMeta) -> None:
        self._buffers[key] = like, like.empty(self._device)

    def wait(self, key: Hashable) -> Payload:
        like, buffer = self._buffers.pop(key)
        return like.unpack(buffer)

    def release(self, key: Hashable) -> None:
        del self._posted[key]

    def finish(self) -> None:
        self._posted.clear()
        assert not self._buffers, "a message was received and never waited for"
