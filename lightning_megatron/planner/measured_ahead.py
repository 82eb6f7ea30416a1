"""Measurements that cores share: while a search measures a layout, other processes measure those that it asks for next.

They are forks, so that they know what has been measured and need no second import. There is one for each thread that
torch has beside the first (`OMP_NUM_THREADS`).
"""

import multiprocessing
import signal
from collections.abc import Iterator
from itertools import islice
from multiprocessing.connection import Connection

import torch

from lightning_megatron.planner.measured import Measure, Measured, UnmeasuredError
from lightning_megatron.planner.run import RunSettings


class MeasuredAhead:
    """A measure of runs without errors, which takes what other processes have measured."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        has_forks = "fork" in multiprocessing.get_all_start_methods()
        self._num_others = torch.get_num_threads() - 1 if has_forks else 0
        self._begun: dict[RunSettings, Connection] = {}

    def expect(self, runs: Iterator[RunSettings]) -> None:
        """Begins to measure runs that will be asked for, the first ones of `runs`, unless others are being measured."""
        if not self._begun:
            self._begun = {run: _begin(self._measure, run) for run in islice(runs, self._num_others)}

    def __call__(self, run: RunSettings) -> Measured:
        if (connection := self._begun.pop(run, None)) is not None:
            try:
                found: Measured | UnmeasuredError = connection.recv()
            except EOFError:
                # What ended the other process is told here.
                return self._measure(run)
            if isinstance(found, UnmeasuredError):
                raise found
            return found
        return self._measure(run)


def _begin(measure: Measure, run: RunSettings) -> Connection:
    """Starts a process that sends its measurement of a run, or closes its end where it fails."""
    forks = multiprocessing.get_context("fork")
    ours, theirs = forks.Pipe(duplex=False)
    # A daemon ends with this process.
    forks.Process(target=_send, args=(measure, run, theirs), daemon=True).start()
    theirs.close()
    return ours


def _send(measure: Measure, run: RunSettings, connection: Connection) -> None:
    # An interrupt is for the process that searches.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        connection.send(measure(run))
    except UnmeasuredError as error:
        connection.send(error)
    except Exception:
        # Whoever searches measures it and tells.
        connection.close()
