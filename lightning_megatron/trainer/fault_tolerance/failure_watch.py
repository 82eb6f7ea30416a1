"""Watch that ends all ranks within seconds of one rank's failure, with the first failure's own traceback.

A rank that raises publishes its traceback in a small store; every rank watches for it from a thread. A rank whose main
thread is stuck in a collective would otherwise learn of it by a time-out half an hour later, or never.
"""

import os
import sys
import threading
import time
import traceback
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.trainer.fault_tolerance.stop_vote import StopVote

# The one key that each rank asks for, twice a second, while all is well.
_NEWS = "news"
_KEY = "failure"
_COUNT = "failures"
_MEETING = "meeting"
_POLL_SECONDS = 0.5
# What a rank gets to fail by itself, with its own stack, before the watcher ends it.
_GRACE_SECONDS = 5.0


class FailureWatch:
    """Watches for the first failure among all ranks, and carries the messages of a vote to stop.

    `store` must be this watch's own client.
    """

    def __init__(self, store: Store, global_rank: int, vote: StopVote) -> None:
        self._store = store
        self._rank = global_rank
        self._vote = vote
        self._stop = threading.Event()
        self._first: str | None = None
        self._num_meetings = 0
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)

    @staticmethod
    def started(host: str, world: Axis, vote: StopVote, timeout: timedelta) -> "FailureWatch":
        """A watch that has begun, over a store that the first rank serves at `host`. Collective over the world."""
        store = None
        if world.rank == 0:
            store = FailureWatch.connect(host, 0, is_host=True, timeout=timeout)
        port = collectives.broadcast_object(store.port if store is not None else None, world)
        if store is None:
            store = FailureWatch.connect(host, port, is_host=False, timeout=timeout)
        watch = FailureWatch(store, world.rank, vote)
        watch.start()
        return watch

    @staticmethod
    def connect(host: str, port: int, *, is_host: bool, timeout: timedelta) -> TCPStore:
        """A client of the store at `host`; with `is_host` and port 0 this rank serves it at a port of its choice."""
        return TCPStore(host, port, is_master=is_host, timeout=timeout, wait_for_workers=False)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch; later failures are not published. Waits seconds for a store that does not answer."""
        self._stop.set()
        if self._thread.is_alive():
            # A thread that comes back from the store while the interpreter ends is ended inside torch's code, and
            # takes the whole process down by an abort.
            self._thread.join(_GRACE_SECONDS)

    def publish(self, error: BaseException) -> str | None:
        """Publishes this rank's failure to all ranks; returns the earlier failure of another rank, if there was one."""
        if self._stop.is_set():
            return None
        self.stop()
        try:
            if self._store.add(_COUNT, 1) > 1:
                self._store.wait([_KEY], timedelta(seconds=_GRACE_SECONDS))
                return str(self._store.get(_KEY), "utf-8")
            text = "".join(traceback.format_exception(error))
            self._store.set(_KEY, f"rank {self._rank} failed:\n{text}")
            self._store.set(_NEWS, "")
            # The store may live in this process, which is about to end: let every watcher read it first.
            time.sleep(3 * _POLL_SECONDS)
        except RuntimeError:
            # The store went with its host: what the watcher read before is all there is to know.
            return self._first
        return None

    def meets(self, num_ranks: int) -> bool:
        """Whether that many ranks, this one among them, come here within seconds of each other."""
        meeting = f"{_MEETING} {self._num_meetings}"
        self._num_meetings += 1
        try:
            if self._store.add(meeting, 1) == num_ranks:
                self._store.set(f"{meeting} is full", "")
            self._store.wait([f"{meeting} is full"], timedelta(seconds=_GRACE_SECONDS))
        except RuntimeError:
            return False
        return True

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            try:
                if self._vote.publish(self._store):
                    self._store.set(_NEWS, "")
                if not self._store.check([_NEWS]):
                    continue
                self._vote.poll(self._store)
                if not self._store.check([_KEY]):
                    continue
                self._first = str(self._store.get(_KEY), "utf-8")
            except RuntimeError:
                return
            if self._stop.wait(_GRACE_SECONDS):
                return
            print(f"rank {self._rank} ends because {self._first}", file=sys.stderr, flush=True)
            os._exit(1)
