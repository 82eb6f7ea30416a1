"""Vote on the place where all ranks stop together once any of them asks, at no cost to the steps until then.

    a rank asks             its watcher puts the reason into the store
    every watcher hears it  and freezes the last place that its rank has passed: at the next one the rank waits
    the last to tell        makes the latest of those places known; every rank stops at its first place after that

Nothing is sent before a rank asks: each rank looks at a flag. The messages go by the threads that watch for failures,
so that a rank hears of it even while it waits in a collective.
"""

import threading
from dataclasses import dataclass, field

from torch.distributed import Store  # type: ignore[attr-defined]

# How long a rank waits at a place until all ranks have told theirs: their threads look twice a second.
_AGREE_SECONDS = 60.0


@dataclass
class _Round:
    """State of one vote, after which another may be held."""

    number: int
    has_told: bool = False
    """Whether this rank has told that it asks."""
    is_frozen: bool = False
    reason: str = ""
    last: int = -1
    """Place that any rank has passed."""
    is_decided: threading.Event = field(default_factory=threading.Event)

    def key(self, what: str) -> str:
        """Key of the store."""
        return f"stop {self.number} {what}"


class StopVote:
    """One rank's part in the votes to stop. Places are growing numbers, equal in every rank's run."""

    def __init__(self, global_rank: int, num_ranks: int) -> None:
        self._rank = global_rank
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        # Reasons in their order; only single operations change it, because a signal may come between two.
        self._asked: dict[str, None] = {}
        self._passed = -1
        self._round = _Round(0)

    def ask(self, reason: str) -> None:
        """Asks all ranks to stop. Takes no lock: a signal may have interrupted whoever holds it."""
        self._asked.setdefault(reason)

    @property
    def asked(self) -> tuple[str, ...]:
        """Why this rank asks."""
        return tuple(self._asked)

    def reason_to_stop(self, place: int) -> str | None:
        """Why all ranks stop at this place; None where they go on. Raises RuntimeError where a rank does not answer."""
        if self._num_ranks == 1:
            return next(iter(self.asked), None)
        with self._lock:
            now = self._round
            if not now.is_frozen:
                self._passed = place
                return None
        if not now.is_decided.wait(_AGREE_SECONDS):
            raise RuntimeError(
                f"{now.reason}, but not all ranks told within {_AGREE_SECONDS:g} s where they are: one is gone, or its "
                "process does not get to run"
            )
        return now.reason if place > now.last else None

    def go_on(self, place: int, reason: str) -> None:
        """After all ranks have stopped at the place for the reason: they go on, and may be asked again."""
        with self._lock:
            self._asked.pop(reason, None)
            self._passed = place
            self._round = _Round(self._round.number + 1)

    def tell(self, store: Store) -> bool:
        """Puts this rank's wish to stop into the store; whether it has one that is new. The watcher calls it."""
        now, asked = self._round, self.asked
        if not asked or now.has_told:
            return False
        # The first rank's reason stays.
        store.compare_set(now.key("reason"), "", asked[0])
        now.has_told = True
        return True

    def hear(self, store: Store) -> None:
        """Answers another rank's wish to stop, and hears of the others' answers. The watcher calls it."""
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
