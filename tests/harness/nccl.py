"""Ranks that are threads, under what NCCL adds to the rules of `tests.harness.threads`.

- The first message between two ranks of a communicator holds up the host of each until the other has posted its own:
  NCCL connects the two then (`ncclTransportP2pSetup`).
- A communicator is a split of the world's, which all ranks of the world enter at one turn (torch, with a `device_id`).

Source: NCCL's `src/transport.cc`, and torch's `new_group`.
"""

from collections.abc import Sequence

from torch import Tensor

from tests.harness.board import MismatchError, Pending
from tests.harness.threads import HERE, ThreadGroup


class Communicator(ThreadGroup):
    """One rank's handle of a communicator."""

    def __init__(self, world: ThreadGroup, ranks: tuple[int, ...]) -> None:
        super().__init__(world.board, ranks, world.global_rank)
        self._connected: set[int] = set()

    def _post(self, sends: bool, tensors: list[Tensor], group_peer: int, tag: int) -> Pending:
        pending = super()._post(sends, tensors, group_peer, tag)
        if group_peer not in self._connected:
            self._connected.add(group_peer)
            self._connect(group_peer)
        return pending

    def _connect(self, group_peer: int) -> None:
        """Holds up this rank until the other one has posted its first message on this communicator too."""
        pair = tuple(sorted((self.global_rank, self.ranks[group_peer])))
        says = f"the first message of rank {self.ranks[group_peer]} to connect with it on ranks {list(self.ranks)}"
        pending = Pending(self.board, self.global_rank, says)
        with self.board.changed:
            other = self.board.connecting.pop((self.key, pair), None)
            if other is None:
                self.board.connecting[self.key, pair] = pending
            else:
                pending.values = other.values = []
                self.board.changed.notify_all()
        pending.wait()


def split(ranks: Sequence[int]) -> Communicator:
    """The calling rank's handle of a new communicator of these global ranks, which include it.

    Every rank of the world calls it at this turn, and all members of a group give the same ranks.
    """
    world: ThreadGroup = HERE.world
    own = tuple(ranks)

    def compute(inputs: list[Sequence[Tensor]], members: list[tuple[int, ...]]) -> list[list[Tensor]]:
        for rank, group in enumerate(members):
            if rank not in group or any(members[other] != group for other in group):
                raise MismatchError(f"rank {rank} makes {list(group)}, and not all of these do, at one turn: {members}")
        return [[] for _ in inputs]

    world.board.meet(world, "split of the world", [], [], compute, extra=own).wait()
    return Communicator(world, own)
