"""Vote on the stop point where all ranks stop together once any of them asks, at no cost to the steps until then.

    a rank asks             its watch tells the server the reason, and that tells all ranks
    every watch answers     with the last stop point that its rank has passed, and freezes: at the next one it waits
    the server has all      and tells the latest of those stop points; every rank stops at its first one after that

Nothing is sent before a rank asks: each rank looks at a flag. The messages go by the threads that watch for failures,
so that a rank hears of it even while it waits in a collective.
"""

import threading
from dataclasses import dataclass, field

from lightning_megatron.trainer.fault_tolerance.message_channel import Message

# How long a rank waits at a stop point until all ranks have told theirs: their threads look twice a second.
_AGREE_SECONDS = 60.0


@dataclass
class _Round:
    """State of one vote, after which another may be held."""

    number: int
    has_asked: bool = False
    """Whether this rank's request has been sent."""
    is_frozen: bool = False
    reason: str = ""
    last: int = -1
    """Latest stop point that any rank has passed."""
    is_decided: threading.Event = field(default_factory=threading.Event)


class StopVote:
    """One rank's part in the votes to stop. Stop points are growing numbers, equal in every rank's run."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        # Reasons in their order; only single operations change it, because a signal may come between two.
        self._reasons: dict[str, None] = {}
        self._passed = -1
        self._round = _Round(0)
        # Messages of the server, by round: one of the next round may come before this rank has ended the last.
        self._requests: dict[int, str] = {}
        self._decisions: dict[int, int] = {}

    def ask(self, reason: str) -> None:
        """Asks all ranks to stop. Takes no lock: a signal may have interrupted whoever holds it."""
        self._reasons.setdefault(reason)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons for which this rank asks to stop."""
        return tuple(self._reasons)

    def reason_to_stop(self, stop_point: int) -> str | None:
        """Why all ranks stop here; None where they go on. Raises RuntimeError where a rank does not answer."""
        if self._num_ranks == 1:
            return next(iter(self.reasons), None)
        with self._lock:
            now = self._round
            if not now.is_frozen:
                self._passed = stop_point
                return None
        if not now.is_decided.wait(_AGREE_SECONDS):
            raise RuntimeError(
                f"{now.reason}, but not all ranks answered within {_AGREE_SECONDS:g} s: one is gone, or its process "
                "does not get to run"
            )
        return now.reason if stop_point > now.last else None

    def go_on(self, stop_point: int, reason: str) -> None:
        """Ends the vote after all ranks have stopped for the reason, so that another one may begin."""
        with self._lock:
            self._reasons.pop(reason, None)
            self._passed = stop_point
            self._round = _Round(self._round.number + 1)

    def hear(self, message: Message) -> None:
        """Notes a message of the server. The watch calls it."""
        if "last" in message:
            self._decisions[message["stop"]] = message["last"]
        else:
            self._requests[message["stop"]] = message["reason"]

    def due(self) -> list[Message]:
        """Messages to the server that are due: a new request of this rank, its answer to one. The watch calls it."""
        now, reasons, messages = self._round, self.reasons, []
        if reasons and not now.has_asked:
            now.has_asked = True
            messages.append({"stop": now.number, "reason": reasons[0]})
        if now.number in self._requests and not now.is_frozen:
            now.reason = self._requests[now.number]
            with self._lock:
                now.is_frozen = True
                messages.append({"stop": now.number, "passed": self._passed})
        if now.number in self._decisions and not now.is_decided.is_set():
            now.last = self._decisions[now.number]
            now.is_decided.set()
        return messages


class StopCount:
    """The server's part in the votes: the first request of each round, and the answers to it."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._requested: set[int] = set()
        self._answers: dict[int, dict[int, int]] = {}

    def hear(self, rank: int, message: Message) -> Message | None:
        """What all ranks are to be told once a rank has sent the message; None: nothing."""
        number = message["stop"]
        if "reason" in message:
            if number in self._requested:
                return None
            self._requested.add(number)
            return message
        answers = self._answers.setdefault(number, {})
        answers[rank] = message["passed"]
        return {"stop": number, "last": max(answers.values())} if len(answers) == self._num_ranks else None
