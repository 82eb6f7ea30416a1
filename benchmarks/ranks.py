"""Starts the ranks of a benchmark as fresh processes and collects what each one prints last, as JSON.

Ranks share nothing with the process that starts them, so that memory peaks and CPU seconds are theirs alone.
"""

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from types import MappingProxyType
from typing import IO, Any

# How long the others may go on after one rank failed: to say that they lost a peer, not to wait for it.
GRACE_SECONDS = 5.0
# The kernel hands out ports above this range by itself, and might give this one away before the first rank listens.
PORTS = range(11000, 32000)


class RankFailed(RuntimeError):
    """A rank ended with an error; the message is what it printed on standard error."""


class RanksTooSlow(RuntimeError):
    """The ranks were not done in time and were ended."""


def run_ranks(
    command: Sequence[str],
    world: int,
    *,
    timeout_seconds: float = 900.0,
    python: str = sys.executable,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[Any]:
    """Last lines printed by `world` processes of `python command...`, by rank.

    Their environment is torchrun's, with one thread a rank, and what `environment` adds. Raises RankFailed, of the rank
    that failed first, or RanksTooSlow; whatever happens, no process is left.
    """
    port = _free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    with ExitStack() as open_files:
        files = [tuple(open_files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)) for _ in range(world)]
        try:
            for rank, (output, errors) in enumerate(files):
                own = {**_environment(rank, world, port), **environment}
                ranks.append(subprocess.Popen([python, *command], env=own, stdout=output, stderr=errors))
            failed = _wait(ranks, time.monotonic() + timeout_seconds)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if failed is not None:
            raise RankFailed(_text(files[failed][1]) or f"a rank ended with status {ranks[failed].returncode}")
        if any(process.returncode for process in ranks):
            raise RanksTooSlow(f"not done in {timeout_seconds:g} s")
        return [json.loads(_text(output).strip().splitlines()[-1]) for output, _ in files]


def _free_port() -> int:
    # The seeded generator would make every benchmark ask for the same port.
    draw = random.SystemRandom()
    while True:
        port = draw.choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "benchmark",
        "OMP_NUM_THREADS": 1,
    }
    return {**os.environ, **{name: str(value) for name, value in own.items()}}


def _wait(ranks: list["subprocess.Popen[bytes]"], deadline: float) -> int | None:
    """Returns when all are done, one failed and its grace is over, or it is too late: the rank that failed first."""
    failed = None
    while time.monotonic() < deadline:
        statuses = [process.poll() for process in ranks]
        if failed is None:
            failed = next((rank for rank, status in enumerate(statuses) if status), None)
            if failed is not None:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if None not in statuses:
            break
        time.sleep(0.05)
    return failed


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
