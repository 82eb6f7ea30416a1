"""Watch that ends all ranks within seconds of one rank's failure or loss, with its cause as far as anybody knows it.

Each rank holds a connection to a server (`failure_server`) from a thread of its own: to that in the first rank, or,
where ranks are many, to that in its parent of a tree. A rank that raises sends its traceback; of a rank that is lost
the server tells. Of the loss of the rank with the server those that are connected to it judge by themselves.
A rank whose main thread is stuck in a collective would otherwise learn of it by a time-out half an hour later, or
never.

    the cause is known      a rank that is to end gets seconds to fail by itself, with its own stack
    it fails by itself      where ranks are lost, it gets seconds to leave the run, which may hang without them
    neither                 the watch ends the process, with exit code 1
"""

import json
import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import NoReturn

from lightning_megatron.comm import collectives
from lightning_megatron.comm.tree_axis import TreeAxis
from lightning_megatron.mesh import Axis
from lightning_megatron.trainer.fault_tolerance.failure_server import FailureServer, Invitation, beat_seconds
from lightning_megatron.trainer.fault_tolerance.lost_ranks import Cause, Process, gone_sentence, silent_sentence
from lightning_megatron.trainer.fault_tolerance.message_channel import Message, MessageChannel, close_in_forks
from lightning_megatron.trainer.fault_tolerance.stop_vote import StopVote

# How often a rank looks whether it asks for a stop itself; what others say wakes the watch.
_POLL_SECONDS = 0.5
# What a rank gets to fail by itself, with its own stack, before the watch ends it.
_GRACE_SECONDS = 5.0
# What a rank that has failed gets to leave the run by itself, once it is known that others are lost.
_LEAVE_SECONDS = 10.0
# How long the end of a watch waits for the server to hang up.
_HANG_UP_SECONDS = 1.0
# Of a traceback, its end: one of thousands of frames need not reach every rank.
_MOST_CHARACTERS = 50_000
_LOOPBACK = ("127.0.0.1", "::1")

EndLost = Callable[[Sequence[int]], None]


@dataclass(eq=False)
class _Meeting:
    """A place at which a rank waits for all others."""

    is_over: threading.Event = field(default_factory=threading.Event)
    absent: int | None = None
    """Rank that will not come."""


def end_none(ranks: Sequence[int]) -> None:
    """Ends no process: whoever started the ranks does."""


class FailureWatch:
    """One rank's watch for the first failure among all ranks; it carries the messages of a vote to stop too."""

    def __init__(
        self,
        channel: MessageChannel,
        above: Process,
        global_rank: int,
        vote: StopVote,
        timeout_seconds: float,
        *,
        server: FailureServer | None = None,
        end_lost: EndLost = end_none,
    ) -> None:
        """Takes over the connection to the server in the process `above`, and this rank's own `server`; see `started`.

        `end_lost` ends what is left of lost ranks, where they are this process's own children.
        """
        self._channel = channel
        self._above = above
        self._rank = global_rank
        self._vote = vote
        self._timeout_seconds = timeout_seconds
        self._server = server
        # A server that hands on what is told; the first rank's is told nothing, for it judges.
        self._relay = server if above.rank != global_rank else None
        self._end_lost = end_lost
        self._cause: Cause | None = None
        # When the cause became known.
        self._known_seconds = float("inf")
        self._is_printed = False
        self._is_failing = False
        self._failure = ""
        self._stop = threading.Event()
        # The cause is known, or the server has come to its end.
        self._is_settled = threading.Event()
        self.has_passed: Callable[[str], bool] = _comes_to_all
        self._num_failures = 0
        self._meetings: dict[str, _Meeting] = {}
        # Places at which others wait for this rank, and whether the last look found it past them. A single look may
        # fall between the end of a batch and what is decided after it.
        self._awaited: dict[str, bool] = {}
        self._outbox: deque[Message] = deque()
        self._wake, self._waking = socket.socketpair()
        self._waking.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)
        if self._relay is not None:
            self._relay.relay(self._post)
        close_in_forks(self, FailureWatch._sockets)

    @staticmethod
    def started(
        address: str | None,
        world: Axis,
        vote: StopVote,
        timeout_seconds: float,
        end_lost: EndLost = end_none,
        *,
        tree: Axis | None = None,
    ) -> "FailureWatch":
        """A watch that has begun. Collective over the world.

        `address` is that of the first rank's machine, None where all ranks are on one machine: the loopback then.
        `tree` is the world over host memory, whose parents get servers where it is a `TreeAxis`.
        """
        # As others know it: a machine may have given its own name to its loopback.
        known_as = (
            _LOOPBACK if address is None else collectives.broadcast_object(_resolved(address), world, world.size - 1)
        )
        above, below = _families(tree if tree is not None else world)
        server = None
        if world.is_first or below.size > 1:
            addresses = known_as if world.is_first or address is None else _own_addresses(known_as)
            ranks = below.ranks if world.is_first else below.ranks[1:]
            server = FailureServer(addresses, world.size, timeout_seconds, own_rank=world.rank, ranks=ranks)
        own = None if server is None else server.invitation
        invitation = collectives.broadcast_object(own, above)
        collectives.broadcast_object(own, below)
        try:
            if server is not None and world.is_first:
                server.start()
            channel = _connected(invitation, world.rank, timeout_seconds)
        except BaseException:
            if server is not None and world.is_first:
                server.stop()
            raise
        watch = FailureWatch(
            channel, invitation.process, world.rank, vote, timeout_seconds, server=server, end_lost=end_lost
        )
        watch.start()
        if server is not None and not world.is_first:
            server.start()
        return watch

    def start(self) -> None:
        """Begins to watch."""
        self._selector.register(self._channel.socket, selectors.EVENT_READ)
        self._selector.register(self._waking, selectors.EVENT_READ)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch; later failures are not published. Returns within seconds, whatever the other ranks do."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._wake.send(b"!")
        self._thread.join(2 * _HANG_UP_SECONDS)
        self._wake.close()
        self._waking.close()
        if self._server is not None:
            self._server.stop()
        if self._cause is not None and self._cause.lost:
            self._end_lost(self._cause.lost)

    def publish(self, error: BaseException) -> str | None:
        """Publishes this rank's failure to all ranks; returns the cause, where it is another and not yet printed."""
        if self._stop.is_set() or self._is_failing:
            return None
        self._failure = "".join(traceback.format_exception(error))[-_MOST_CHARACTERS:]
        self._is_failing = True
        self._post({"failure": self._failure})
        self._is_settled.wait(_GRACE_SECONDS)
        cause = self._cause
        if cause is None and (silent := self._silent_seconds()) > 2 * beat_seconds(self._timeout_seconds):
            cause = Cause(text=silent_sentence([self._above], silent, self._timeout_seconds))
        if cause is None or cause.rank == self._rank or self._is_printed:
            return None
        self._is_printed = True
        return cause.text

    def meets(self) -> bool:
        """Whether all ranks come here, after a failure, within seconds of each other."""
        if self._stop.is_set():
            return False
        self._num_failures += 1
        return self._begin_meeting(f"failure {self._num_failures}").is_over.wait(_GRACE_SECONDS)

    def absent_at(self, place: str) -> int | None:
        """A rank that has passed the place, where this one waits for all; None once all have come to it.

        Raises RuntimeError where another failure ends the run meanwhile.
        """
        meeting = self._begin_meeting(place)
        while not meeting.is_over.wait(_POLL_SECONDS):
            if self._is_settled.is_set():
                raise RuntimeError("the run ends" if self._cause is None else self._cause.text)
        if meeting.absent is None:
            # They may come here again.
            del self._meetings[place]
        return meeting.absent

    def _begin_meeting(self, place: str) -> _Meeting:
        # It may be over, where another rank has waited before.
        meeting = self._meetings.setdefault(place, _Meeting())
        self._post({"meet": place})
        return meeting

    def _post(self, message: Message) -> None:
        if self._stop.is_set():
            # The rank's own server may still hear of others.
            return
        self._outbox.append(message)
        self._wake.send(b"!")

    def _sockets(self) -> list[socket.socket]:
        return [self._channel.socket, self._wake, self._waking]

    # --- the thread -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        next_beat_seconds = 0.0
        while not self._stop.is_set() and (self._channel.is_open or self._cause is not None):
            self._selector.select(self._wait_seconds())
            self._hear()
            now_seconds = time.monotonic()
            while self._outbox:
                self._channel.send(self._outbox.popleft())
            for message in self._vote.due():
                self._channel.send(message)
            for place, was_passed in list(self._awaited.items()):
                self._awaited[place] = self.has_passed(place)
                if was_passed and self._awaited[place]:
                    del self._awaited[place]
                    self._channel.send({"meet": place, "has_passed": True})
            if now_seconds >= next_beat_seconds:
                next_beat_seconds = now_seconds + beat_seconds(self._timeout_seconds)
                self._channel.send({})
            self._channel.flush()
            if now_seconds >= self._known_seconds + self._limit_seconds() and not self._stop.is_set():
                self._end_process()
        self._hang_up()

    def _wait_seconds(self) -> float:
        return min(_POLL_SECONDS, beat_seconds(self._timeout_seconds))

    def _limit_seconds(self) -> float:
        """How long this rank may go on once the cause is known."""
        if not self._is_failing:
            return _GRACE_SECONDS
        return _LEAVE_SECONDS if self._cause is not None and self._cause.lost else float("inf")

    def _hear(self) -> None:
        """Hears what the server says, or that it is gone; judges its silence only after that."""
        with suppress(BlockingIOError):
            self._waking.recv(1 << 10)
        if not self._channel.is_open:
            return
        is_left = False
        for message in self._channel.messages():
            if "cause" in message:
                self._learn(Cause(text=message["cause"], rank=message["rank"], lost=message["lost"]))
            elif "stop" in message:
                self._vote.hear(message)
                self._hand_down(message)
            elif "meet" in message:
                self._awaited[message["meet"]] = False
                self._hand_down(message)
            elif "met" in message:
                self._end_meeting(message["met"], message["absent"])
                self._hand_down(message)
            is_left |= "bye" in message
        if not self._channel.is_open or is_left:
            self._channel.is_open = False
            self._selector.unregister(self._channel.socket)
            if not is_left:
                self._learn(Cause(text=gone_sentence([self._above]), lost=[self._above.rank]))
            self._is_settled.set()
        elif self._above.rank != self._rank and self._silent_seconds() >= self._timeout_seconds:
            text = silent_sentence([self._above], self._silent_seconds(), self._timeout_seconds)
            self._learn(Cause(text=text, lost=[self._above.rank]))

    def _end_meeting(self, place: str, absent: int | None) -> None:
        self._awaited.pop(place, None)
        meeting = self._meetings.setdefault(place, _Meeting())
        meeting.absent = absent
        meeting.is_over.set()

    def _silent_seconds(self) -> float:
        return time.monotonic() - self._channel.heard_seconds

    def _learn(self, cause: Cause) -> None:
        if self._cause is not None:
            return
        self._cause = cause
        self._known_seconds = time.monotonic()
        self._hand_down({"cause": cause.text, "rank": cause.rank, "lost": list(cause.lost)})
        if cause.lost:
            # None of them says so itself, and whoever started this rank may end it before it does.
            self._print(f"ends because {cause.text}")
        self._is_settled.set()

    def _hand_down(self, message: Message) -> None:
        if self._relay is not None:
            self._relay.hand_down(message)

    def _end_process(self) -> NoReturn:
        if self._is_failing:
            self._print(f"ends, for it did not leave the run within {_LEAVE_SECONDS:g} s of this:\n{self._failure}")
        if self._cause is not None:
            if not self._is_printed:
                self._print(f"ends because {self._cause.text}")
            self._end_lost(self._cause.lost)
        os._exit(1)

    def _print(self, text: str) -> None:
        self._is_printed = True
        print(f"rank {self._rank} {text}", file=sys.stderr, flush=True)

    def _hang_up(self) -> None:
        """Says that this rank has come to its end, and waits for seconds only until the server has heard it."""
        if self._channel.is_open:
            self._channel.send({"bye": True})
            self._channel.end()
            until_seconds = time.monotonic() + _HANG_UP_SECONDS
            while self._channel.next_line(until_seconds) is not None:
                pass
        self._channel.close()
        self._selector.close()


def _comes_to_all(place: str) -> bool:
    return False


def _families(world: Axis) -> tuple[Axis, Axis]:
    """The ranks whose parent is this rank's, and those whose parent it is, both with the parent as their first."""
    if isinstance(world, TreeAxis):
        return world.above, world.below
    alone = Axis.alone(world.rank)
    return (alone, world) if world.is_first else (world, alone)


def _own_addresses(others: Sequence[str]) -> list[str]:
    """Addresses of this machine from which it talks to the others; no message is sent to learn them."""
    own = []
    for other in others:
        family = socket.AF_INET6 if ":" in other else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((other, 9))
            own.append(str(sock.getsockname()[0]))
    return own or list(others)


def _resolved(address: str) -> list[str]:
    """Addresses of the internet protocol that a name has here."""
    try:
        return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(address, None)))
    except OSError:
        return [address]


def _connected(invitation: Invitation, rank: int, timeout_seconds: float) -> MessageChannel:
    """A connection to the server, which has let this rank in. Raises RuntimeError where there is no way to it."""
    until_seconds = time.monotonic() + timeout_seconds
    greeting = json.dumps(asdict(Process.own(rank))).encode()
    fault: object = "it hung up"
    while (left_seconds := until_seconds - time.monotonic()) > 0:
        try:
            sock = socket.create_connection((invitation.host, invitation.port), left_seconds)
        except OSError as error:
            fault = error
        else:
            channel = MessageChannel(sock, timeout_seconds)
            if (challenge := channel.next_line(until_seconds)) is not None:
                channel.send_line(invitation.proof(challenge, greeting) + b" " + greeting)
                if channel.next_line(until_seconds) is not None:
                    return channel
            channel.close()
        time.sleep(0.1)
    raise RuntimeError(
        f"rank {rank} does not reach the failure watch of {invitation.process} at {invitation.host}:{invitation.port} "
        f"within {timeout_seconds:g} s ({fault}); the machines of a run must reach each other at every port"
    )
