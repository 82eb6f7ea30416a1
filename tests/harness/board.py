"""Where ranks that are threads meet: every operation that was posted and not yet matched, and who waits for what."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from tests.harness.threads import ThreadGroup

Key = tuple[tuple[int, ...], int]
"""A communicator: the global ranks in it, and a count of those made before with the same ranks."""


class MismatchError(RuntimeError):
    """Two ranks did not mean the same thing: kind, order, shape, dtype, splits or tag."""


class DeadlockError(RuntimeError):
    """No rank can go on; the message lists what each waits for."""


class RankEnded(RuntimeError):
    """This rank was ended because another one failed; the cause is that failure."""


class Pending(dist.Work):
    """One operation of one rank, done when its counterparts have arrived; `wait` lands its result."""

    def __init__(self, board: "Board", rank: int, says: str, outputs: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.board, self.rank, self.says = board, rank, says
        self.outputs = list(outputs)
        self.values: list[Tensor] | None = None
        self.error: str | None = None
        self.waited = False
        self.source = -1
        board.posted[rank].append(self)

    @property
    def settled(self) -> bool:
        return self.values is not None or self.error is not None

    def wait(self, timeout: Any = None) -> bool:
        """Waits for the counterparts and writes the result into the output tensors."""
        self.board.wait_for(self)
        if not self.waited:
            self.waited = True
            assert self.values is not None
            with torch.no_grad():
                for output, value in zip(self.outputs, self.values, strict=True):
                    output.detach().copy_(value.view(output.shape))
            self.outputs, self.values = [], []  # the run keeps this object; it must not keep buffers alive
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self.settled

    def _source_rank(self) -> int:
        return self.source


@dataclass
class Message:
    """One send or receive: `peer` is a global rank."""

    sends: bool
    tensor: Tensor
    rank: int
    peer: int
    pending: Pending


@dataclass
class Step:
    """Messages that may be taken in any order: one alone, or those of one `batch_isend_irecv`."""

    batch: list[Any] | None
    num_posted: int = 0
    messages: list[Message] = field(default_factory=list)


@dataclass
class Meeting:
    """One collective: who has arrived with what."""

    says: str
    inputs: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    extra: dict[int, Any] = field(default_factory=dict)
    pending: dict[int, Pending] = field(default_factory=dict)


class Board:
    """What the ranks of one run share: every operation that has been posted and not yet met."""

    def __init__(self, num_ranks: int, limit_seconds: float) -> None:
        self.num_ranks, self.limit_seconds = num_ranks, limit_seconds
        self.changed = threading.Condition(threading.RLock())
        self.failure: tuple[int, BaseException] | None = None
        self.finished: set[int] = set()
        self.waiting: dict[int, Pending] = {}
        self.main_threads: dict[int, int] = {}
        self.has_other_threads = False
        self.posted: list[list[Pending]] = [[] for _ in range(num_ranks)]
        self.meetings: dict[tuple[Key, int], Meeting] = {}
        self.streams: dict[tuple[Key, int, int], deque[Step]] = {}
        # Of a communicator and two of its ranks: the one that waits for the other's first message.
        self.connecting: dict[tuple[Key, tuple[int, ...]], Pending] = {}
        self.num_made: dict[tuple[int, tuple[int, ...]], int] = {}
        self.new_groups: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]

    def fail(self, rank: int, error: BaseException) -> None:
        """Ends every rank; the first failure is kept."""
        with self.changed:
            self.failure = self.failure or (rank, error)
            self.changed.notify_all()

    def finish(self, rank: int) -> None:
        """This rank posts nothing more."""
        with self.changed:
            self.finished.add(rank)
            self.changed.notify_all()

    def stop_if_failed(self) -> None:
        """Raises RankEnded once another rank has failed."""
        if self.failure is not None:
            rank, error = self.failure
            raise RankEnded(f"ended because rank {rank} failed: {error!r}") from error

    def wait_for(self, pending: Pending) -> None:
        """Returns when the operation is done. Raises for a mismatch, a failure elsewhere, a circle of waits."""
        in_main_thread = self.main_threads.get(pending.rank) == threading.get_ident()
        deadline = time.monotonic() + self.limit_seconds
        with self.changed:
            self.has_other_threads |= not in_main_thread
            if in_main_thread:
                self.waiting[pending.rank] = pending
            try:
                while not pending.settled:
                    self.stop_if_failed()
                    left_seconds = deadline - time.monotonic()
                    if self._is_stuck() or left_seconds <= 0:
                        raise DeadlockError(self._who_waits_for_what(left_seconds))
                    self.changed.wait(left_seconds)
            finally:
                if in_main_thread:
                    self.waiting.pop(pending.rank, None)
        if pending.error is not None:
            raise MismatchError(pending.error)

    def _is_stuck(self) -> bool:
        if self.has_other_threads or len(self.waiting) + len(self.finished) < self.num_ranks:
            return False
        return not any(pending.settled for pending in self.waiting.values())

    def _who_waits_for_what(self, left_seconds: float) -> str:
        why = f"waited for {self.limit_seconds:g} s" if left_seconds <= 0 else "deadlock: no rank can go on"
        lines = [why]
        for rank in range(self.num_ranks):
            if rank in self.waiting:
                lines.append(f"  rank {rank} waits for {self.waiting[rank].says}{self._behind(self.waiting[rank])}")
            else:
                lines.append(f"  rank {rank} {'has returned' if rank in self.finished else 'is computing'}")
        return "\n".join(lines)

    def _behind(self, pending: Pending) -> str:
        for steps in self.streams.values():
            for step in list(steps)[1:]:
                if any(message.pending is pending for message in step.messages):
                    return f", behind its {steps[0].messages[0].pending.says}"
        return ""

    def meet(
        self,
        group: "ThreadGroup",
        says: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        compute: Callable[[list[Sequence[Tensor]], list[Any]], list[list[Tensor]]],
        extra: Any = None,
    ) -> Pending:
        """Joins the group's next collective; the last rank to arrive computes everybody's result."""
        with self.changed:
            self.stop_if_failed()
            place = (group.key, group.num_collectives)
            group.num_collectives += 1
            pending = Pending(self, group.global_rank, f"{says} on ranks {list(group.ranks)}", outputs)
            meeting = self.meetings.setdefault(place, Meeting(says))
            me = group.rank()
            meeting.inputs[me], meeting.extra[me], meeting.pending[me] = inputs, extra, pending
            if says != meeting.says:
                first = next(iter(meeting.pending.values()))
                self._refuse(
                    f"collective {place[1]} of ranks {list(group.ranks)}: rank {first.rank} calls {meeting.says}, "
                    f"rank {group.global_rank} calls {says}",
                    list(meeting.pending.values()),
                )
            if len(meeting.pending) == group.size():
                order = range(group.size())
                del self.meetings[place]
                try:
                    with torch.no_grad():
                        values = compute([meeting.inputs[i] for i in order], [meeting.extra[i] for i in order])
                except MismatchError as error:
                    self._refuse(f"{says} on ranks {list(group.ranks)}: {error}", list(meeting.pending.values()))
                for i in order:
                    meeting.pending[i].values = values[i]
                self.changed.notify_all()
            return pending

    def post(self, group: "ThreadGroup", message: Message, batch: list[Any] | None) -> None:
        """Adds a send or receive after those of this rank to that peer, and matches what can be matched."""
        with self.changed:
            self.stop_if_failed()
            mine = self.streams.setdefault((group.key, message.rank, message.peer), deque())
            theirs = self.streams.setdefault((group.key, message.peer, message.rank), deque())
            last = mine[-1] if mine else None
            if last is None or batch is None or last.batch is not batch or last.num_posted == len(batch):
                mine.append(Step(batch))
            mine[-1].messages.append(message)
            mine[-1].num_posted += 1
            while mine and theirs and self._match(mine[0], theirs[0]):
                for steps in (mine, theirs):
                    if not steps[0].messages:
                        steps.popleft()
            self.changed.notify_all()

    def _match(self, mine: Step, theirs: Step) -> bool:
        for ours in mine.messages:
            other = next((message for message in theirs.messages if message.sends is not ours.sends), None)
            if other is None:
                continue
            sent, received = (ours, other) if ours.sends else (other, ours)
            if (sent.tensor.shape, sent.tensor.dtype) != (received.tensor.shape, received.tensor.dtype):
                self._refuse(
                    f"rank {sent.rank} sends {described(sent.tensor)} to rank {received.rank}, "
                    f"which receives {described(received.tensor)}",
                    [sent.pending, received.pending],
                )
            received.pending.values = [sent.tensor.detach().clone()]
            sent.pending.values = []
            mine.messages.remove(ours)
            theirs.messages.remove(other)
            return True
        return False

    def _refuse(self, why: str, pending: list[Pending]) -> None:
        for each in pending:
            each.error = why
            each.waited = True
        self.changed.notify_all()
        raise MismatchError(why)


def described(*tensors: Tensor) -> str:
    """Dtype and shape of each tensor, as error messages show them."""
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)
