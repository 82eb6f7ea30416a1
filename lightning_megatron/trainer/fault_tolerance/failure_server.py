"""Server of the failure watch, in a thread of a rank: it hears what happens to any rank, and tells them all.

    a rank connects         and proves that it knows the server's token; once all have come, nobody else can
    it says something       at least ten times in timeout_seconds, be it nothing but that it is there
    it raises               and says so: a failure
    its connection closes   without a word before: its process is gone
    it is silent            for timeout_seconds: it is stopped, or out of reach

The first failure, or the ranks that are lost, are told to every rank, and so are the votes to stop. What is sent grows
with the number of ranks and not with their pairs.

The server in the first rank judges. Where ranks are many, those that are parents in a tree have servers for their
children: such a server hands on what it hears to the one above, as a rank's own word, and what is told from there to
its children (`relay`).
"""

import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from lightning.pytorch.utilities import rank_zero_warn

from lightning_megatron.trainer.fault_tolerance.lost_ranks import Cause, Process, gone_sentence, silent_sentence
from lightning_megatron.trainer.fault_tolerance.message_channel import (
    MOST_BYTES,
    Message,
    MessageChannel,
    close_in_forks,
)
from lightning_megatron.trainer.fault_tolerance.stop_vote import StopCount

# How often the server looks whether a rank is silent for too long.
_LOOK_SECONDS = 1.0
# Within so many seconds of a first failure the loss of a rank, which may be its cause, is heard of too.
_SETTLE_SECONDS = 0.25
# How long the end of the server waits for ranks that do not hang up.
_HANG_UP_SECONDS = 1.0
# What a rank says about itself before it is known, with room to spare.
_GREETING_BYTES = 4096
# Connections of strangers that are held open beside those of ranks, until all ranks have come.
_MOST_STRANGERS = 64
_BACKLOG = 4096
# What wakes the server: its end, or a message from above.
_END, _HANDED = b"!", b"."


def beat_seconds(timeout_seconds: float) -> float:
    """Longest time that a rank, or the server, is silent while all is well."""
    return min(timeout_seconds / 10, 30.0)


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """What a rank needs to know to connect. The token must reach no one but the ranks."""

    host: str
    port: int
    token: bytes
    process: Process
    """Process with the server."""

    def proof(self, challenge: bytes, greeting: bytes) -> bytes:
        """Shows that who sends the greeting knows the token; it serves for one challenge only."""
        return hmac.new(self.token, challenge + b" " + greeting, "sha256").hexdigest().encode()


@dataclass(kw_only=True)
class _Peer:
    """A connection, of a rank once it has proven to be one."""

    channel: MessageChannel
    challenge: bytes
    process: Process | None = None
    has_left: bool = False
    """Whether it has come to its end, and said so."""


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What another server last said of a rank that is silent."""

    process: Process
    heard_seconds: float
    said_seconds: float


class FailureServer:
    """Hears every rank, and tells each one what ends the run."""

    def __init__(
        self,
        addresses: Sequence[str],
        num_ranks: int,
        timeout_seconds: float,
        *,
        own_rank: int = 0,
        ranks: Iterable[int] | None = None,
    ) -> None:
        """Listens at the first of the addresses that is this machine's, for connections of `ranks`; None: of all."""
        host, self._listener = _listener(addresses)
        port = self._listener.getsockname()[1]
        own = Process.own(own_rank)
        self.invitation = Invitation(host=host, port=port, token=secrets.token_bytes(32), process=own)
        self._timeout_seconds = timeout_seconds
        self._started_seconds = time.monotonic()
        self._strangers: dict[socket.socket, _Peer] = {}
        self._peers: dict[int, _Peer] = {}
        self._num_ranks = num_ranks
        self._missing = set(range(num_ranks) if ranks is None else ranks)
        self._reports: dict[int, _Report] = {}
        self._hand_up: Callable[[Message], None] | None = None
        self._handed_down: deque[Message] = deque()
        self._gone: list[Process] = []
        self._failure: tuple[int, str] | None = None
        # When what is known is told; it never is while all is well.
        self._tell_seconds = float("inf")
        self._has_told = False
        self._is_ending = False
        self._meetings: dict[str, set[int]] = {}
        self._stops = StopCount(num_ranks)
        self._selector = selectors.DefaultSelector()
        self._wake, self._waking = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="failure-server", daemon=True)
        close_in_forks(self, FailureServer._sockets)

    def start(self) -> None:
        """Begins to serve."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._waking, selectors.EVENT_READ, self._wake_up)
        self._thread.start()

    def relay(self, hand_up: Callable[[Message], None]) -> None:
        """Makes this the server of a rank that is not the first, before it starts: `hand_up` sends to the one above."""
        self._hand_up = hand_up

    def hand_down(self, message: Message) -> None:
        """Tells the ranks that are connected here what the server above has told."""
        self._handed_down.append(message)
        self._wake.send(_HANDED)

    def stop(self) -> None:
        """Ends the server; ranks that are still connected go on without. Returns within seconds."""
        self._wake.send(_END)
        self._thread.join(2 * _HANG_UP_SECONDS)

    def _sockets(self) -> list[socket.socket]:
        peers = [*self._strangers.values(), *self._peers.values()]
        return [self._listener, self._wake, self._waking, *(peer.channel.socket for peer in peers)]

    # --- the thread -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        pause_seconds = beat_seconds(self._timeout_seconds)
        next_look_seconds = next_beat_seconds = time.monotonic()
        while not self._hear_all(min(next_look_seconds, self._tell_seconds)):
            # What has come meanwhile has been read: after a pause of this process nobody seems silent who is not.
            now_seconds = time.monotonic()
            if now_seconds >= next_beat_seconds:
                next_beat_seconds = now_seconds + pause_seconds
                self._tell({})
            if now_seconds >= next_look_seconds:
                next_look_seconds = now_seconds + min(pause_seconds, _LOOK_SECONDS)
                self._look(now_seconds)
            if now_seconds >= self._tell_seconds:
                self._tell_cause(now_seconds)
        self._hang_up()

    def _hear_all(self, until_seconds: float) -> bool:
        """Serves those who say something until then; returns whether the server is to end."""
        blocked = [peer.channel for peer in self._peers.values() if peer.channel.is_blocked]
        for channel in blocked:
            channel.flush()
        wait_seconds = max(0.0, until_seconds - time.monotonic())
        for key, _ in self._selector.select(min(wait_seconds, 0.1) if blocked else wait_seconds):
            # What an earlier one of these did may have closed it.
            if key.fd >= 0 and key.fd in self._selector.get_map():
                key.data()
        return self._is_ending

    def _wake_up(self) -> None:
        is_ending = _END in self._waking.recv(1 << 10)
        while self._handed_down:
            self._tell(self._handed_down.popleft())
        if is_ending:
            self._selector.unregister(self._waking)
            self._is_ending = True

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._meet(sock)

    def _meet(self, sock: socket.socket) -> None:
        if len(self._strangers) >= len(self._missing) + _MOST_STRANGERS:
            # The longest there: a rank greets at once.
            self._drop(next(iter(self._strangers.values())))
        channel = MessageChannel(sock, self._timeout_seconds, _GREETING_BYTES)
        peer = _Peer(channel=channel, challenge=secrets.token_hex(32).encode())
        self._strangers[sock] = peer
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._hear(peer))
        channel.send_line(peer.challenge)

    def _hear(self, peer: _Peer) -> None:
        if peer.process is None:
            self._hear_stranger(peer)
            return
        rank = peer.process.rank
        for message in peer.channel.messages():
            self._act(rank, message)
        if not peer.channel.is_open:
            self._drop(peer)
            if not peer.has_left:
                peer.has_left = True
                self._lose(peer.process)

    def _hear_stranger(self, peer: _Peer) -> None:
        """Lets in who proves to be a rank that has not come yet. Nothing that others say is read any further."""
        lines = peer.channel.lines()
        if not lines and peer.channel.is_open:
            return
        process = self._proven(peer.challenge, lines[0]) if lines else None
        if process is None or process.rank not in self._missing:
            self._drop(peer)
            return
        peer.process = process
        peer.channel.most_bytes = MOST_BYTES
        del self._strangers[peer.channel.socket]
        self._peers[process.rank] = peer
        self._missing.remove(process.rank)
        # The last one is welcome once no one else is.
        if not self._missing:
            self._close_door()
        peer.channel.send({"welcome": True})

    def _proven(self, challenge: bytes, line: bytes) -> Process | None:
        proof, _, greeting = line.partition(b" ")
        if not hmac.compare_digest(proof, self.invitation.proof(challenge, greeting)):
            return None
        return Process(**json.loads(greeting))

    def _close_door(self) -> None:
        """All ranks are here: from now on no one can connect."""
        self._selector.unregister(self._listener)
        self._listener.close()
        for stranger in list(self._strangers.values()):
            self._drop(stranger)

    def _drop(self, peer: _Peer) -> None:
        self._strangers.pop(peer.channel.socket, None)
        self._selector.unregister(peer.channel.socket)
        peer.channel.close()

    def _lose(self, process: Process) -> None:
        if self._hand_up is not None:
            self._hand_up({"gone": asdict(process)})
            return
        self._gone.append(process)
        self._tell_soon()

    def _look(self, now_seconds: float) -> None:
        """Sees who is silent for too long; of the ranks of another server that one says who may soon be."""
        if self._hand_up is None:
            if self._silent(now_seconds, self._timeout_seconds):
                self._tell_soon()
        elif silent := self._silent(now_seconds, self._suspicious_seconds):
            seconds = [now_seconds - self._heard_seconds(process.rank) for process in silent]
            self._hand_up({"silent": list(map(asdict, silent)), "seconds": seconds})

    @property
    def _suspicious_seconds(self) -> float:
        return min(self._timeout_seconds, max(self._timeout_seconds / 2, 3 * beat_seconds(self._timeout_seconds)))

    def _act(self, peer_rank: int, message: Message) -> None:
        """Acts on what a rank says, or what the server in it has heard of the rank that is named in the message."""
        rank = message.setdefault("of", peer_rank)
        if rank == peer_rank and ("failure" in message or "bye" in message):
            self._peers[rank].has_left = True
        if "bye" in message or message.keys() == {"of"}:
            return
        if self._hand_up is not None:
            self._hand_up(message)
        elif "failure" in message:
            if self._failure is None:
                self._failure = rank, message["failure"]
            self._tell_soon()
        elif "gone" in message:
            self._lose(Process(**message["gone"]))
        elif "silent" in message:
            now_seconds = time.monotonic()
            for process, seconds in zip(message["silent"], message["seconds"], strict=True):
                self._reports[process["rank"]] = _Report(
                    process=Process(**process), heard_seconds=now_seconds - seconds, said_seconds=now_seconds
                )
        elif "has_passed" in message:
            self._tell({"met": message["meet"], "absent": rank})
        elif "meet" in message:
            met = self._meetings.setdefault(message["meet"], set())
            met.add(rank)
            if len(met) == 1:
                self._tell({"meet": message["meet"]})
            if len(met) == self._num_ranks:
                del self._meetings[message["meet"]]
                self._tell({"met": message["meet"], "absent": None})
        elif "stop" in message and (answer := self._stops.hear(rank, message)) is not None:
            self._tell(answer)

    # --- what is told -----------------------------------------------------------------------------------------------

    def _tell(self, message: Message) -> None:
        for peer in self._peers.values():
            if peer.channel.is_open:
                peer.channel.send(message)

    def _tell_soon(self) -> None:
        if not self._has_told:
            self._tell_seconds = min(self._tell_seconds, time.monotonic() + _SETTLE_SECONDS)

    def _tell_cause(self, now_seconds: float) -> None:
        cause, self._tell_seconds = self._cause(now_seconds), float("inf")
        if not cause.text:
            # Who was silent has spoken meanwhile.
            return
        self._has_told = True
        self._tell({"cause": cause.text, "rank": cause.rank, "lost": list(cause.lost)})

    def _cause(self, now_seconds: float) -> Cause:
        """Ranks that are lost before one that raised: it may well have raised because of them."""
        silent = self._silent(now_seconds, self._timeout_seconds)
        lost = [process.rank for process in [*self._gone, *silent]]
        sentences = [gone_sentence(self._gone)] if self._gone else []
        if silent:
            sentences.append(self._silence(silent, now_seconds))
        if self._failure is None:
            return Cause(text="; ".join(sentences), lost=lost)
        rank, text = self._failure
        if lost:
            last_line = text.strip().rpartition("\n")[2]
            return Cause(text="; ".join([*sentences, f"then rank {rank} failed: {last_line}"]), lost=lost)
        text = f"rank {rank} failed:\n{text}"
        # A collective that timed out has waited for somebody.
        if suspects := self._silent(now_seconds, self._suspicious_seconds):
            text = f"{text.rstrip()}\n{self._silence(suspects, now_seconds)}\n"
        return Cause(text=text, rank=rank)

    def _silence(self, silent: Sequence[Process], now_seconds: float) -> str:
        longest = max(now_seconds - self._heard_seconds(process.rank) for process in silent)
        return silent_sentence(silent, longest, self._timeout_seconds)

    def _silent(self, now_seconds: float, limit_seconds: float) -> list[Process]:
        """Ranks, of those that have not left, that have said nothing for so long."""
        there = [peer.process for peer in self._peers.values() if not peer.has_left]
        elsewhere = [
            report.process
            for report in self._reports.values()
            # Of a rank that has spoken meanwhile nothing more is said.
            if now_seconds - report.said_seconds <= 3 * _LOOK_SECONDS
        ]
        ranks = [*filter(None, there), *(Process(rank=rank) for rank in sorted(self._missing)), *elsewhere]
        return [process for process in ranks if now_seconds - self._heard_seconds(process.rank) >= limit_seconds]

    def _heard_seconds(self, rank: int) -> float:
        if rank in self._reports:
            return self._reports[rank].heard_seconds
        return self._peers[rank].channel.heard_seconds if rank in self._peers else self._started_seconds

    def _hang_up(self) -> None:
        """Lets every rank hear what is still to be told, and that nothing more will be; waits for seconds only."""
        now_seconds = time.monotonic()
        if self._tell_seconds < float("inf"):
            self._tell_cause(now_seconds)
        self._tell({"bye": True})
        for peer in self._peers.values():
            if peer.channel.is_open:
                peer.channel.end()
        while (
            any(peer.channel.is_open for peer in self._peers.values())
            and time.monotonic() < now_seconds + _HANG_UP_SECONDS
        ):
            self._hear_all(time.monotonic() + 0.05)
        self._selector.close()
        for sock in self._sockets():
            sock.close()


def _listener(addresses: Sequence[str]) -> tuple[str, socket.socket]:
    """A socket that listens at one of the addresses, and that address."""
    fault = None
    for address in addresses:
        try:
            return address, _listen(address)
        except OSError as error:
            fault = error
    rank_zero_warn(
        f"the failure watch cannot listen at {', '.join(addresses)} ({fault}), as the other ranks know this machine; "
        "it listens at all its addresses until all ranks have come, who show a token of this run"
    )
    address = addresses[0]
    return address, _listen("::" if ":" in address else "")


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
