"""Measurements that cores share: while a search measures a layout, other processes measure those that it asks for next.

They are forks, so that they know what has been measured and need no second import. There is one for each thread that
torch has beside the first (`OMP_NUM_THREADS`), on Linux alone: elsewhere a fork may fail in the system's libraries.
"""

import multiprocessing
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType

import torch

from lightning_megatron.planner.measured import Measure, Measured, UnmeasuredError
from lightning_megatron.planner.run import RunSettings


@dataclass(frozen=True)
class _Other:
    """A process that measures a run."""

    process: BaseProcess
    connection: Connection

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.connection.close()


class MeasuredAhead:
    """A measure of runs without errors, which takes what other processes have measured; they end with its block."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._num_others = torch.get_num_threads() - 1 if sys.platform == "linux" else 0
        self._begun: dict[RunSettings, _Other] = {}

    def __enter__(self) -> "MeasuredAhead":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.expect([])

    def expect(self, runs: Sequence[RunSettings]) -> None:
        """Begins to measure runs of these, of which the first will be asked for next and is measured here, and ends
        what measures others."""
        for run in [run for run in self._begun if run not in runs]:
            self._begun.pop(run).end()
        for run in runs[1:]:
            if len(self._begun) >= self._num_others:
                break
            if run not in self._begun:
                try:
                    self._begun[run] = _begin(self._measure, run)
                except OSError:
                    # The machine has no room for another process: this one measures.
                    self._num_others = len(self._begun)

    def __call__(self, run: RunSettings) -> Measured:
        if (other := self._begun.pop(run, None)) is None:
            return self._measure(run)
        try:
            found: Measured | UnmeasuredError = other.connection.recv()
        except (EOFError, OSError):
            # What ended the other process, even while it sent, is told here.
            return self._measure(run)
        finally:
            other.end()
        if isinstance(found, UnmeasuredError):
            raise found
        return found


def _begin(measure: Measure, run: RunSettings) -> _Other:
    """Starts a process that sends its measurement of a run, or closes its end where it fails."""
    forks = multiprocessing.get_context("fork")
    ours, theirs = forks.Pipe(duplex=False)
    # A daemon ends with this process.
    process = forks.Process(target=_send, args=(measure, run, theirs), daemon=True)
    with theirs:
        process.start()
    return _Other(process, ours)


def _send(measure: Measure, run: RunSettings, connection: Connection) -> None:
    # An interrupt is for the process that searches.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A fork has none of OpenMP's threads, and would wait for them forever.
    torch.set_num_threads(1)
    try:
        connection.send(measure(run))
    except UnmeasuredError as error:
        connection.send(error)
    except Exception:
        # Whoever searches measures it and tells.
        connection.close()
