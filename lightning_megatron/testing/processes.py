"""The processes of a certificate: each runs one function and reports, and none outlives its time.

They are forks of a server that has torch and Lightning loaded, so that a layout begins in tenths of a second. The
functions are found by their names, as multiprocessing finds them.
"""

import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.testing.user_file import module_of_file

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = ["lightning_megatron.testing.run"]
# How long the others go on after one process ended without a report.
_GRACE_SECONDS = 15.0
# The kernel hands out ports above this range by itself.
_PORTS = range(11000, 32000)
_LAST_WORDS = 2000


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended."""

    result: Any = None
    """What its function returned."""
    failure: str = ""
    """Why there is no result; empty where there is one."""
    printed: str = ""
    """The end of what it printed."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A function for another process, with the files of modules that it may not find by name."""

    pickled: bytes
    files: dict[str, str]

    @staticmethod
    def of(function: Callable[[], Any], found_in: Sequence[Callable[..., Any]] = ()) -> "Task":
        """The task of a call. Raises ValueError for a function that another process cannot import."""
        try:
            pickled = pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"certify starts processes, which import what they call: give functions or classes that stand at the "
                f"top level of a file, and no lambda and no function inside of another ({error})"
            ) from error
        files = {}
        for one in found_in:
            while isinstance(one, partial):
                one = one.func
            file = getattr(sys.modules.get(one.__module__), "__file__", None)
            if file is not None and one.__module__ != "__main__":
                files[one.__module__] = file
        return Task(pickled=pickled, files=files)

    def run(self) -> Any:
        """Calls the function."""
        for name, file in self.files.items():
            if name not in sys.modules and not _is_found(name):
                module_of_file(Path(file), name)
        return pickle.loads(self.pickled)()


def _is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _is_right(result: Any) -> bool:
    return True


def run_processes(
    tasks: Sequence[Task], *, limit_seconds: float, is_right: Callable[[Any], bool] = _is_right
) -> list[Ended]:
    """How each of the tasks ended, each in a process of its own, side by side; all have ended when this returns.

    A process whose result is not `is_right` ends at once, and by that the ones that wait for it. The others keep their
    connections open until all are done.
    """
    _CONTEXT.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory(prefix="certify-") as folder:
        started: list[tuple[BaseProcess, Connection]] = []
        try:
            for index, task in enumerate(tasks):
                ours, theirs = _CONTEXT.Pipe()
                process: BaseProcess = _CONTEXT.Process(
                    target=_serve, args=(task, str(Path(folder) / f"{index}.log"), theirs, limit_seconds)
                )
                process.start()
                theirs.close()
                started.append((process, ours))
            results = _listen(started, limit_seconds, is_right)
        finally:
            for _, connection in started:
                # It waits for this: a process that is done keeps its connections open for those that are not.
                connection.close()
            for process, _ in started:
                process.join(timeout=2.0)
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()
        return [
            Ended(result=result, failure=failure, printed=_last_words(Path(folder) / f"{index}.log"))
            for index, (result, failure) in enumerate(results)
        ]


def _listen(
    started: Sequence[tuple[BaseProcess, Connection]], limit_seconds: float, is_right: Callable[[Any], bool]
) -> list[tuple[Any, str]]:
    waiting = {connection: index for index, (_, connection) in enumerate(started)}
    found: dict[int, tuple[Any, str]] = {}
    end_seconds = time.monotonic() + limit_seconds
    while waiting and (left_seconds := end_seconds - time.monotonic()) > 0:
        for connection in wait(list(waiting), timeout=left_seconds):
            assert isinstance(connection, Connection)
            index = waiting.pop(connection)
            try:
                found[index] = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                process = started[index][0]
                process.join(timeout=5.0)
                found[index] = None, f"the process ended by {_how(process.exitcode)} without a word"
            if not found[index][1] and not is_right(found[index][0]):
                connection.close()
            if found[index][1]:
                end_seconds = min(end_seconds, time.monotonic() + _GRACE_SECONDS)
    return [found.get(i, (None, f"it was not done after {limit_seconds:.0f} s")) for i in range(len(started))]


def _how(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _last_words(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:].strip() if log.exists() else ""


def _serve(task: Task, log: str, connection: Connection, limit_seconds: float) -> None:
    """What runs in the process: the task, its report, and the wait for the others."""
    # Where the parent is gone nobody else would end it.
    signal.alarm(int(limit_seconds) + 10)
    with open(log, "w", buffering=1, encoding="utf-8") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    faulthandler.enable()
    torch.set_num_threads(1)
    try:
        report = task.run(), ""
    except BaseException as error:
        report = None, str(error) or type(error).__name__
    connection.send_bytes(pickle.dumps(report))
    # Other ranks may need its connections still.
    connection.poll(limit_seconds)


def free_port() -> int:
    """A port on which nobody listens, and that the kernel gives to nobody before the caller listens there."""
    # Not the seeded generator, or every certificate would ask for the same port.
    draw = random.SystemRandom()
    while True:
        port = draw.choice(_PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
