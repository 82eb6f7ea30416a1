"""Real ranks for tests: a function runs in N processes joined by gloo, and the first fault is reported as it happened.

The processes are forks of one server that has torch and Lightning loaded (about 4 s once, then 0.1 to 0.4 s a test).
A rank that raises ends the others within seconds and the test fails with that rank's own traceback; ranks that are
stuck are ended by their process id, with the stack each of them was in.
"""

import contextlib
import faulthandler
import functools
import importlib
import multiprocessing
import os
import pickle
import random
import re
import reprlib
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.device import rank_environment

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = multiprocessing.get_context("forkserver")

# What the ranks of a test have; one that needs longer says so.
LIMIT_SECONDS = 60.0
# How long the others may go on after one rank failed: long enough to hear a fault that came first but is shown later.
GRACE_SECONDS = 2.0
# How long a rank that is done keeps its connections open for the ranks that are not.
LINGER_SECONDS = 30.0
# The kernel hands out ports above this range by itself, to gloo among others.
PORTS = range(11000, 32000)

LOST_PEER = re.compile(r"connection (closed|reset|refused|was)|broken pipe|closed by peer|connection to peer", re.I)


class RankFailed(AssertionError):
    """A rank raised, died or was stuck; the message holds its own traceback."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one rank is to run, and in which surroundings."""

    module: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    init: bool
    backend: str
    timeout_seconds: float
    linger_seconds: float
    environment: dict[str, str]
    start_method: str
    folder: str
    # (action, message pattern, category, module pattern, line) of the running test.
    warning_filters: list[tuple[str, str, type[Warning], str, int]]


@dataclass(kw_only=True)
class Report:
    """How one rank ended: `done`, `failed`, `skipped`, `died` or `stuck`."""

    rank: int
    ending: str
    result: Any = None
    text: str = ""
    summary: str = ""
    at_seconds: float = field(default_factory=time.monotonic)

    @property
    def is_cause(self) -> bool:
        """The rank failed by itself, not because another one went away."""
        return self.ending in ("failed", "died") and not LOST_PEER.search(self.summary)


def on_ranks(
    num_ranks: int, *, init: bool = True, backend: str = "gloo", timeout: float = LIMIT_SECONDS
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the test's body runs on `num_ranks` real processes. Its arguments must pickle (tmp_path does)."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            _run(num_ranks, test, args, kwargs, init=init, backend=backend, timeout=timeout)

        run.on_rank = test  # type: ignore[attr-defined]
        return run

    return decorate


def run_on_ranks(
    num_ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    init: bool = True,
    backend: str = "gloo",
    timeout: float = LIMIT_SECONDS,
) -> list[Any]:
    """What `fn(*args)` returned on each rank. `fn` is a module-level function; arguments and results must pickle."""
    __tracebackhide__ = True
    return _run(num_ranks, fn, args, {}, init=init, backend=backend, timeout=timeout)


def _run(
    num_ranks: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    init: bool,
    backend: str,
    timeout: float,
) -> list[Any]:
    __tracebackhide__ = True
    if "." in fn.__qualname__ or fn.__module__ == "__main__":
        raise TypeError(
            f"{fn.__qualname__} of {fn.__module__}: ranks import it, so it must stand alone in a test module"
        )
    start_server()
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        task = pickle.dumps(
            Task(
                module=fn.__module__,
                name=fn.__name__,
                args=args,
                kwargs=kwargs,
                init=init,
                backend=backend,
                timeout_seconds=timeout,
                linger_seconds=LINGER_SECONDS,
                environment=dict(os.environ),
                start_method=multiprocessing.get_start_method(),
                folder=folder,
                warning_filters=_warning_filters(),
            )
        )
        ranks: list[tuple[BaseProcess, Connection]] = []
        try:
            for rank in range(num_ranks):
                ours, theirs = CONTEXT.Pipe()
                process = CONTEXT.Process(target=rank_main, args=(task, rank, num_ranks, port, theirs), daemon=False)
                process.start()
                theirs.close()
                ranks.append((process, ours))
            reports = _listen(ranks, folder, timeout)
            if all(report.ending == "done" for report in reports):
                _dismiss(ranks)
        finally:
            for process, connection in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()
                connection.close()
        printed = [_printed(folder, rank) for rank in range(num_ranks)]
    return _conclude(reports, printed, timeout)


def start_server() -> None:
    """Starts the fork server unless it runs; what its libraries read from the environment is set only for that."""
    CONTEXT.set_forkserver_preload(["tests.harness.preload"])
    wanted = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def free_port() -> int:
    """A port no one listens on, and that the kernel gives to nobody before the caller listens there."""
    draw = random.SystemRandom()  # not the seeded one, or every session would ask for the same port
    while True:
        port = draw.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _warning_filters() -> list[tuple[str, str, type[Warning], str, int]]:
    def pattern(expression: Any) -> str:
        return getattr(expression, "pattern", expression) or ""

    return [
        (action, pattern(message), category, pattern(module), line)
        for action, message, category, module, line in warnings.filters
    ]


def _listen(ranks: list[tuple[BaseProcess, Connection]], folder: str, timeout: float) -> list[Report]:
    """One report of every rank, in order, once all have ended or cannot be waited for any longer."""
    open_ends = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    reports: dict[int, Report] = {}
    deadline = time.monotonic() + timeout
    while open_ends and (left_seconds := deadline - time.monotonic()) > 0:
        for connection in wait(list(open_ends), timeout=left_seconds):
            assert isinstance(connection, Connection)
            rank = open_ends.pop(connection)
            reports[rank] = _receive(connection, ranks[rank][0], rank)
            if reports[rank].ending != "done":
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    for rank in open_ends.values():
        process = ranks[rank][0]
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)  # faulthandler writes the stacks, even from inside a C call
    for rank in open_ends.values():
        reports[rank] = Report(rank=rank, ending="stuck", text=_stack_of(folder, rank, ranks[rank][0]))
    return [reports[rank] for rank in range(len(ranks))]


def _receive(connection: Connection, process: BaseProcess, rank: int) -> Report:
    try:
        report: Report = pickle.loads(connection.recv_bytes())
        return report
    except (EOFError, ConnectionError):
        process.join(timeout=30)
        code = process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return Report(rank=rank, ending="died", summary=how, text=f"the process ended by {how} without a word\n")


def _stack_of(folder: str, rank: int, process: BaseProcess) -> str:
    """What faulthandler wrote for a stuck rank; waits for it while the rank is there to write."""
    path = Path(folder, f"stack-{rank}")
    for _ in range(200):
        if path.exists() and (text := path.read_text()):
            time.sleep(0.05)  # the rest of a dump that is being written
            return path.read_text() or text
        if not process.is_alive():
            # A Trainer puts signals back to what Python knows of, and this one then ends the process.
            break
        time.sleep(0.05)
    return "(it left no stack: it had not begun to run the test, or was behind a Trainer's run)\n"


def _dismiss(ranks: list[tuple[BaseProcess, Connection]]) -> None:
    """Lets the ranks close their groups, now that none needs another any more."""
    for _, connection in ranks:
        with contextlib.suppress(OSError):
            connection.send_bytes(b"go")
    deadline = time.monotonic() + 2 * LINGER_SECONDS
    for process, _ in ranks:
        process.join(timeout=max(0.0, deadline - time.monotonic()))


def _printed(folder: str, rank: int) -> str:
    path = Path(folder, f"printed-{rank}")
    return path.read_text(errors="replace") if path.exists() else ""


def _conclude(reports: list[Report], printed: list[str], timeout: float) -> list[Any]:
    """The results, or a failure that begins with the rank that failed by itself and first."""
    __tracebackhide__ = True
    for rank, text in enumerate(printed):
        for line in text.splitlines():
            print(f"[rank {rank}] {line}")
    skipped = [report for report in reports if report.ending == "skipped"]
    faults = [report for report in reports if report.ending in ("failed", "died")]
    if faults:
        first = min(faults, key=lambda report: (not report.is_cause, report.at_seconds))
        others = [_line(report) for report in reports if report is not first]
        raise RankFailed("\n".join([f"rank {first.rank} of {len(reports)} failed:", first.text, *others])) from None
    if skipped:
        pytest.skip(skipped[0].text)
    stuck = [report for report in reports if report.ending == "stuck"]
    if stuck:
        names = ", ".join(str(report.rank) for report in stuck)
        stacks = [f"rank {report.rank} was stuck here:\n{report.text}" for report in stuck]
        raise RankFailed(
            f"rank {names} of {len(reports)} did not end within {timeout:g} s\n" + "\n".join(stacks)
        ) from None
    return [report.result for report in reports]


def _line(report: Report) -> str:
    outcomes = {
        "done": "had ended well",
        "stuck": "was still running and was ended",
        "skipped": f"skipped: {report.text}",
    }
    return f"rank {report.rank} {outcomes.get(report.ending, f'failed as well: {report.summary}')}"


def rank_main(task_bytes: bytes, rank: int, num_ranks: int, port: int, parent: Connection) -> None:
    """The life of one rank: set up, run, report, and stay until the others are done."""
    report = Report(rank=rank, ending="failed")
    try:
        task: Task = pickle.loads(task_bytes)
        _settle(task, rank, num_ranks, port)
        fn = getattr(importlib.import_module(task.module), task.name)
        result = _call(getattr(fn, "on_rank", fn), task)
        report = Report(rank=rank, ending="done", result=result)
        message = pickle.dumps(report)
    except BaseException as error:
        report = _failure(error, rank)
        message = pickle.dumps(report)
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):  # the parent may have given up on this rank
        parent.send_bytes(message)
    if report.ending != "done":
        os._exit(1)  # peers that wait for this rank learn it at once
    parent.poll(task.linger_seconds)
    if dist.is_initialized():
        dist.destroy_process_group()


def _settle(task: Task, rank: int, num_ranks: int, port: int) -> None:
    """Gives this process its rank's surroundings; what torchrun sets is set alike, so a Trainer runs in it too."""
    printed = os.open(f"{task.folder}/printed-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
    stack = os.open(f"{task.folder}/stack-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)

    # A child of a fork server would start its own children, as workers of loaders are, by servers without our modules.
    multiprocessing.set_start_method(task.start_method, force=True)
    os.environ.clear()
    os.environ.update(task.environment)
    os.environ.update(
        OMP_NUM_THREADS="1",
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID=f"test-{port}",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
    )
    os.environ.update(rank_environment(rank, num_ranks))
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        # A thread of gloo that wakes up while another one holds its lock polls until it is free.
        # Woken threads of this policy let the running one have its time. Without it ranks only take longer.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    # The same on every rank: tests make the whole problem everywhere and compare slices of it.
    random.seed(0)
    torch.manual_seed(0)


def _call(fn: Callable[..., Any], task: Task) -> Any:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category, module, line in reversed(task.warning_filters):
            warnings.filterwarnings(action, message, category, module, line)  # type: ignore[arg-type]
        if task.init:
            dist.init_process_group(task.backend, timeout=timedelta(seconds=task.timeout_seconds))
            if task.backend == "gloo":
                # A rank that is done at once would take the store along while others still connect.
                dist.barrier()
        return fn(*task.args, **task.kwargs)


def _failure(error: BaseException, rank: int) -> Report:
    if isinstance(error, pytest.skip.Exception):
        return Report(rank=rank, ending="skipped", text=str(error))
    lines = traceback.format_exception(error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    in_tests = [frame for frame in frames if "/tests/" in frame.f_code.co_filename and frame.f_code.co_name != "_call"]
    if in_tests and isinstance(error, AssertionError) and not str(error):
        # A bare assert: no rewriting here, so show what it looked at.
        lines.append("where\n")
        lines.extend(f"  {name} = {reprlib.repr(value)}\n" for name, value in in_tests[-1].f_locals.items())
    summary = "".join(traceback.format_exception_only(error)).strip()
    return Report(rank=rank, ending="failed", text="".join(lines), summary=summary)
