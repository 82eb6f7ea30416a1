"""A pool of worker processes for numbered jobs, none of which outlives the pool.

Under `prepare.py`. Processes are forked: they share the parent's memory, and nothing of a user's script runs twice.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

Report = Callable[[Sequence[int]], None]
"""Function that adds to the sums of all jobs."""

_WATCH_SECONDS = 0.2


def run_jobs(
    jobs: Sequence[int],
    do: Callable[[int, Report], None],
    *,
    num_processes: int,
    num_sums: int,
    watch: Callable[[Sequence[int]], None],
) -> None:
    """Does every job once; calls `watch` with the sums now and then and at the end.

    With 0 processes in this one, else each process takes the next job until there is none. Raises what a job raised, or
    RuntimeError where a process was ended; the others are then ended too.
    """
    if num_processes == 0:
        sums = [0] * num_sums

        def report(added: Sequence[int]) -> None:
            sums[:] = [a + b for a, b in zip(sums, added, strict=True)]
            watch(sums)

        for job in jobs:
            do(job, report)
        return
    context = multiprocessing.get_context("fork")
    next_job = context.Value("q", 0)
    totals = context.RawArray("q", num_processes * num_sums)
    failures = context.SimpleQueue()
    processes = [
        context.Process(target=_work, args=(jobs, do, next_job, totals, number, num_sums, failures, os.getpid()))
        for number in range(num_processes)
    ]
    try:
        for process in processes:
            process.start()
        _watch_over(processes, failures, lambda: watch([sum(totals[i::num_sums]) for i in range(num_sums)]))
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def _watch_over(processes: Sequence[BaseProcess], failures: Any, watch: Callable[[], None]) -> None:
    running = list(processes)
    while running:
        wait([process.sentinel for process in running], _WATCH_SECONDS)
        watch()
        for process in [process for process in running if process.exitcode is not None]:
            running.remove(process)
            if process.exitcode != 0:
                raise RuntimeError(
                    f"a process that tokenizes was ended (exit code {process.exitcode}; -9 mostly says that memory ran"
                    " out: take fewer workers)"
                )
            if not failures.empty():
                raise failures.get()


def _work(
    jobs: Sequence[int],
    do: Callable[[int, Report], None],
    next_job: Any,
    totals: Any,
    number: int,
    num_sums: int,
    failures: Any,
    parent: int,
) -> None:
    # The parent receives an interrupt, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Each process is one of many: `tokenizers` is not to start threads for every core in each.
    os.putenv("TOKENIZERS_PARALLELISM", "false")

    def report(added: Sequence[int]) -> None:
        # A parent that was killed ends nobody.
        if os.getppid() != parent:
            os._exit(1)
        for i, value in enumerate(added):
            totals[number * num_sums + i] += value

    try:
        while True:
            with next_job.get_lock():
                index = next_job.value
                next_job.value += 1
            if index >= len(jobs):
                return
            do(jobs[index], report)
    except (ValueError, OSError, ImportError) as error:
        failures.put(error)
