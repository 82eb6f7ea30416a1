"""The doctor's ping: ranks come together, reduce tensors, and whoever does not come or hangs ends it within its time.

Each rank that communicates is a process of its own (`rank.py`), which the doctor starts and watches, so that
nothing that NCCL does keeps the doctor from its answer. Without a launcher one doctor starts all ranks; with one, each
process of the launcher is a doctor of one rank, and the doctor of rank 0 tells what all have found:

    all doctors       write a word about themselves into the store at MASTER_ADDR:MASTER_PORT
    doctor of rank 0  waits for all words, and writes the plan: the backend, or that somebody has not come
    all doctors       start their rank; the doctor of rank 0 reads all results, and writes that they may leave
"""

import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import IO

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lightning_megatron.cli.doctor.launch import Launch
from lightning_megatron.cli.doctor.outcome import (
    NobodyThereError,
    PingOutcome,
    Timing,
    Word,
    backend_for,
    bus_gb_per_second,
    failed_outcome,
    missing_outcome,
)
from lightning_megatron.cli.doctor.rank import (
    ENDED,
    FAILED,
    PingPlace,
    PingResult,
    leave_result,
    read_result,
    result_key,
    stage_key,
)

_NAME = "lightning_megatron/doctor"
_PLAN, _LEAVE, _LEFT = "plan", "leave", "left"
_POLL_SECONDS = 0.05
# A look at the words reads all of them: of thousands of ranks rather now and then.
_POLL_SECONDS_A_RANK = 2e-4
# How long the others may go on after one rank failed: the cause may be another's.
_GRACE_SECONDS = 2.0
# A rank gives up by itself so long before it is ended, and says what it waits for.
_LAST_SECONDS = 2.0
_LAST_WORDS = 300
# It finds packages where this process does.
_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from lightning_megatron.cli.doctor.rank import main
main()
"""


@dataclass(frozen=True, kw_only=True)
class PingRequest:
    """What is asked of a ping."""

    sizes_bytes: tuple[int, ...]
    limit_seconds: float


def ping_locally(request: PingRequest, num_ranks: int, *, has_gpus: bool) -> PingOutcome:
    """The ping over ranks of this machine, each on a GPU of its own or all on the CPU."""
    until_seconds = time.monotonic() + request.limit_seconds
    timeout = timedelta(seconds=request.limit_seconds)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    backend = "nccl" if has_gpus else "gloo"
    launch = Launch(world=num_ranks, address="127.0.0.1", port=server.port)
    store = PrefixStore(_name(launch), server)
    places = [_place(request, replace(launch, rank=rank, local_rank=rank), backend) for rank in range(num_ranks)]
    why = "processes of this machine, each on a GPU" if has_gpus else "processes of this machine, on the CPU"
    _run_ranks(store, places, until_seconds)
    return replace(_outcome(store, num_ranks, backend, request.limit_seconds), why=why)


def ping_launched(request: PingRequest, launch: Launch, word: Word) -> tuple[PingOutcome, dict[int, Word]] | None:
    """The ping over the ranks of a launcher, and the words of those that came; None on all ranks but the first.

    Raises NobodyThereError where rank 0 does not come.
    """
    until_seconds = time.monotonic() + request.limit_seconds
    try:
        store = PrefixStore(_name(launch), _meeting_store(launch, until_seconds))
        store.set(_word_key(launch.rank), json.dumps(word.record))
        if launch.rank == 0:
            return _first_of_launched(request, launch, store, until_seconds)
        _other_of_launched(request, launch, store, until_seconds)
        return None
    except DistError as error:
        told = f"the store at {launch.address}:{launch.port} cannot be used: {str(error).partition(chr(10))[0]}"
        if launch.rank != 0:
            raise NobodyThereError(told) from error
        mend = "set MASTER_PORT to a free port of the machine with rank 0"
        return PingOutcome(world=launch.world, backend="", failure=told, mend=mend), {0: word}


def _first_of_launched(
    request: PingRequest, launch: Launch, store: Store, until_seconds: float
) -> tuple[PingOutcome, dict[int, Word]]:
    keys = {rank: _word_key(rank) for rank in range(launch.world)}
    poll_seconds = max(_POLL_SECONDS, launch.world * _POLL_SECONDS_A_RANK)
    while not (is_complete := store.check(list(keys.values()))) and time.monotonic() < until_seconds:
        time.sleep(poll_seconds)
    come = [rank for rank, key in keys.items() if is_complete or store.check([key])]
    words = {rank: Word.of(json.loads(store.get(keys[rank]))) for rank in come}
    if len(come) < launch.world:
        missing = [rank for rank in keys if rank not in words]
        store.set(_PLAN, json.dumps(""))
        where = f"{launch.address}:{launch.port}"
        outcome = missing_outcome(launch.world, missing, where, request.limit_seconds)
    else:
        backend, why = backend_for({rank: word.has_gpu for rank, word in words.items()})
        store.set(_PLAN, json.dumps(backend))
        # The doctor of rank 0 holds the store where the launcher does not.
        near = launch if launch.is_store_there else replace(launch, address="127.0.0.1")
        _run_ranks(store, [_place(request, near, backend)], time.monotonic() + request.limit_seconds)
        outcome = replace(_outcome(store, launch.world, backend, request.limit_seconds), why=why)
    store.set(_LEAVE, "")
    # The store ends with this process.
    end_seconds = time.monotonic() + _GRACE_SECONDS
    while store.add(_LEFT, 0) < len(come) - 1 and time.monotonic() < end_seconds:
        time.sleep(_POLL_SECONDS)
    return outcome, words


def _other_of_launched(request: PingRequest, launch: Launch, store: Store, until_seconds: float) -> None:
    # The doctor of rank 0 may have come later, and waits for all of them as long.
    is_first_there = _is_there(store, _word_key(0), until_seconds)
    if not is_first_there or not _is_there(store, _PLAN, time.monotonic() + request.limit_seconds + _GRACE_SECONDS):
        raise NobodyThereError(f"rank 0 has not come to {launch.address}:{launch.port}")
    if backend := json.loads(store.get(_PLAN)):
        until_seconds = time.monotonic() + request.limit_seconds
        _run_ranks(store, [_place(request, launch, backend)], until_seconds)
        _is_there(store, _LEAVE, until_seconds + _GRACE_SECONDS)
    store.add(_LEFT, 1)


def _name(launch: Launch) -> str:
    # The store of torchrun has what a former attempt has written.
    return f"{_NAME} {launch.attempt}"


def _place(request: PingRequest, launch: Launch, backend: str) -> PingPlace:
    return PingPlace(
        address=launch.address,
        port=launch.port,
        name=_name(launch),
        rank=launch.rank,
        world=launch.world,
        local_rank=launch.local_rank,
        backend=backend,
        sizes_bytes=request.sizes_bytes,
        limit_seconds=request.limit_seconds,
    )


def _meeting_store(launch: Launch, until_seconds: float) -> Store:
    timeout = timedelta(seconds=max(until_seconds - time.monotonic(), 1.0))
    if launch.rank == 0 and not launch.is_store_there:
        return TCPStore("127.0.0.1", launch.port, is_master=True, wait_for_workers=False, timeout=timeout)
    # A store that waits for a port by itself writes a stack into the output for each second.
    while not _listens(launch.address, launch.port):
        if time.monotonic() > until_seconds:
            raise NobodyThereError(f"rank 0 has not come to {launch.address}:{launch.port}: nobody listens there")
        time.sleep(_POLL_SECONDS * 4)
    return _client(launch, timeout)


def _client(launch: Launch, timeout: timedelta) -> Store:
    """A client of rank 0's store. Raises NobodyThereError where what listens there is none."""
    made: list[Store] = []
    failed: list[Exception] = []

    def connect() -> None:
        try:
            made.append(TCPStore(launch.address, launch.port, is_master=False, timeout=timeout))
        except Exception as error:
            # Raised again by whoever waits.
            failed.append(error)

    # It waits for an answer without end, whatever its own time limit.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout.total_seconds() + _LAST_SECONDS)
    if failed:
        raise failed[0]
    if not made:
        raise NobodyThereError(
            f"what listens at {launch.address}:{launch.port} does not answer as rank 0 does; another program may have "
            "the port"
        )
    return made[0]


def _listens(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=2.0):
            return True
    except (OSError, UnicodeError):
        return False


def _word_key(rank: int) -> str:
    return f"word {rank}"


def _is_there(store: Store, key: str, until_seconds: float) -> bool:
    while not store.check([key]):
        if time.monotonic() > until_seconds:
            return False
        time.sleep(_POLL_SECONDS * 4)
    return True


def _run_ranks(store: Store, places: Sequence[PingPlace], until_seconds: float) -> None:
    """Runs ranks as processes until those of all doctors have ended, one has failed, or the time is over."""
    with ExitStack() as stack:
        started, is_failing = [], False
        for place in places:
            log = stack.enter_context(tempfile.TemporaryFile())
            left_seconds = max(until_seconds - time.monotonic() - _LAST_SECONDS, 1.0)
            process = _started(replace(place, limit_seconds=left_seconds), log)
            stack.callback(_end, process)
            started.append((place.rank, process, log))
        while time.monotonic() < until_seconds and not _is_over(store, places[0].world):
            _tell_deaths(store, started)
            if not is_failing and store.add(FAILED, 0):
                is_failing = True
                until_seconds = min(until_seconds, time.monotonic() + _GRACE_SECONDS)
            time.sleep(_POLL_SECONDS)


def _is_over(store: Store, world: int) -> bool:
    return store.add(ENDED, 0) == world or store.check([_LEAVE])


def _started(place: PingPlace, log: IO[bytes]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, json.dumps(asdict(place)), json.dumps(sys.path)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tell_deaths(store: Store, started: Sequence[tuple[int, "subprocess.Popen[bytes]", IO[bytes]]]) -> None:
    """Leaves a result for each process that has ended without one."""
    for rank, process, log in started:
        if (code := process.poll()) is None or store.check([result_key(rank)]):
            continue
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        log.seek(0)
        last = " ".join(log.read().decode(errors="replace").split())[-_LAST_WORDS:]
        failure = f"its process ended {how}" + (f"; its last words: ... {last}" if last else "")
        leave_result(store, rank, PingResult(failure=failure, ended_seconds=time.time()))


def _outcome(store: Store, world: int, backend: str, limit_seconds: float) -> PingOutcome:
    results = {rank: result for rank in range(world) if (result := read_result(store, rank)) is not None}
    silent = [rank for rank in range(world) if rank not in results]
    failed = sorted((result.ended_seconds, rank) for rank, result in results.items() if result.failure)
    if silent or failed:
        return failed_outcome(
            world,
            backend,
            failures={rank: results[rank].failure for _, rank in failed},
            stages=_stages(store, world),
            silent=silent,
            seconds=limit_seconds,
        )
    timings = tuple(
        Timing(
            size_bytes=one.size_bytes,
            seconds=one.seconds,
            bus_gb_per_second=bus_gb_per_second(world, one.size_bytes, one.seconds),
        )
        for one in results[0].reductions
    )
    return PingOutcome(world=world, backend=backend, timings=timings)


def _stages(store: Store, world: int) -> Mapping[int, str]:
    keys = {rank: stage_key(rank) for rank in range(world)}
    return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
