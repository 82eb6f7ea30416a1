"""Vote on the stop point where all ranks stop together once any of them asks, at no cost to the steps until then.

    a rank asks             its watcher publishes the reason in the store
    every watcher reads it  and freezes the last stop point that its rank has passed: at the next one the rank waits
    the last to answer      publishes the latest of those stop points; every rank stops at its first one after that

Nothing is sent before a rank asks: each rank looks at a flag. The messages go by the threads that watch for failures,
so that a rank hears of it even while it waits in a collective.
"""

import threading
from dataclasses import dataclass, field

from torch.distributed import Store  # type: ignore[attr-defined]

# How long a rank waits at a stop point until all ranks have published theirs: their threads look twice a second.
_AGREE_SECONDS = 60.0


@dataclass
class _Round:
    """State of one vote, after which another may be held."""

    number: int
    has_published: bool = False
    """Whether this rank has published its request."""
    is_frozen: bool = False
    reason: str = ""
    last: int = -1
    """Latest stop point that any rank has passed."""
    is_decided: threading.Event = field(default_factory=threading.Event)

    def key(self, what: str) -> str:
        """Key of the store."""
        return f"stop {self.number} {what}"


class StopVote:
    """One rank's part in the votes to stop. Stop points are growing numbers, equal in every rank's run."""

    def __init__(self, global_rank: int, num_ranks: int) -> None:
        self._rank = global_rank
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        # Reasons in their order; only single operations change it, because a signal may come between two.
        self._reasons: dict[str, None] = {}
        self._passed = -1
        self._round = _Round(0)

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

    def publish(self, store: Store) -> bool:
        """Publishes this rank's request to stop; returns whether it has a new one. The watcher calls it."""
        now, reasons = self._round, self.reasons
        if not reasons or now.has_published:
            return False
        # The first rank's reason stays.
        store.compare_set(now.key("reason"), "", reasons[0])
        now.has_published = True
        return True

    def poll(self, store: Store) -> None:
        """Answers another rank's request to stop, and reads the others' answers. The watcher calls it."""
        now = self._round
        if now.is_decided.is_set() or not store.check([now.key("reason")]):
            return
        if not now.is_frozen:
            now.reason = str(store.get(now.key("reason")), "utf-8")
            with self._lock:
                now.is_frozen = True
                passed = self._passed
            store.set(now.key(f"of {self._rank}"), str(passed))
            if store.add(now.key("answers"), 1) == self._num_ranks:
                answers = store.multi_get([now.key(f"of {rank}") for rank in range(self._num_ranks)])
                store.set(now.key("last"), str(max(map(int, answers))))
        if store.check([now.key("last")]):
            now.last = int(store.get(now.key("last")))
            now.is_decided.set()
