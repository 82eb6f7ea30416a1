"""Two tasks of one rank that take turns: one computes until it has a message to wait for, then the other one does.

The runtime runs a forward and a backward so where a schedule pairs them. Whoever waits for a message of a layer calls
`yield_to_peer` first; the message travels while the other task computes. One of the two runs at a time, and turns
change at points that the program fixes, so all ranks that run the same pair start their messages in one order.

Note: one engine for a GPU. Autograd runs all backwards of a device in one thread of its own. While the second task is a
backward that waits for its turn there, a first task that differentiates anything by itself would wait for ever.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class _Abandoned(BaseException):
    """Ends a task whose other one has failed; a BaseException, so that no `except Exception` of a step stops it."""


class ForwardBackwardOverlap:
    """Runs pairs of tasks in turns; `device` is that on which both compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="overlap")
        self._changed = threading.Condition()
        # Whether two tasks run.
        self._first_thread: int | None = None
        # Task whose turn it is.
        self._turn = 0
        self._ended = [False, False]
        self._has_failed = False

    def __reduce__(self) -> tuple[type["ForwardBackwardOverlap"], tuple[torch.device]]:
        # A copy has a thread of its own.
        return ForwardBackwardOverlap, (self._device,)

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Runs both to their end, the first in this thread. Raises what either raises, and abandons the other."""
        self._turn, self._ended, self._has_failed = 0, [False, False], False
        self._first_thread = threading.get_ident()
        running = self._pool.submit(self._run_second, second, self._stream())
        try:
            with self._task(0):
                first()
        finally:
            error = running.exception()
            self._first_thread = None
        if error is not None:
            raise error

    def yield_to_peer(self) -> None:
        """Lets the other task go on until it yields itself or ends; does nothing where no two tasks run."""
        if self._first_thread is None:
            return
        # A backward may run in a thread of autograd's.
        own = 0 if threading.get_ident() == self._first_thread else 1
        with self._changed:
            if not self._ended[1 - own]:
                self._turn = 1 - own
                self._changed.notify_all()
                self._await_turn(own)
        self._abandon_if_failed()

    def _stream(self) -> AbstractContextManager[object]:
        """The caller's stream, for the other thread: the current device and stream are a thread's own."""
        if self._device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.current_stream(self._device))

    def _run_second(self, second: Callable[[], None], stream: AbstractContextManager[object]) -> None:
        with self._task(1):
            with self._changed:
                self._await_turn(1)
            self._abandon_if_failed()
            with stream:
                second()

    @contextmanager
    def _task(self, own: int) -> Iterator[None]:
        """A block that is one of the two tasks; an abandoned one ends in silence, since the other says why."""
        try:
            yield
        except _Abandoned:
            pass
        except BaseException:
            self._has_failed = True
            raise
        finally:
            with self._changed:
                self._ended[own] = True
                self._turn = 1 - own
                self._changed.notify_all()

    def _await_turn(self, own: int) -> None:
        self._changed.wait_for(lambda: self._turn == own)

    def _abandon_if_failed(self) -> None:
        if self._has_failed:
            raise _Abandoned
