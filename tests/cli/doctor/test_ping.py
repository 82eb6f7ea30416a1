"""The doctor's ping over real processes: it ends in its time, whatever a rank does, and says why."""

import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_megatron.cli.doctor import ping
from lightning_megatron.cli.doctor.launch import Launch
from lightning_megatron.cli.doctor.outcome import NobodyThereError, PingOutcome, Word
from lightning_megatron.cli.doctor.ping import PingRequest, ping_launched, ping_locally
from lightning_megatron.testing.processes import free_port

# What starts a rank, but that the second one does something first.
UNLIKE = """
import json, os, signal, sys, time
sys.path[:] = json.loads(sys.argv.pop())
import lightning_megatron.cli.doctor.rank as ranks
if json.loads(sys.argv[1])["rank"] == 1:
    {}
ranks.main()
"""
KILLED = "print('last words', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
HANGS = "ranks._timed = lambda size_bytes, device: time.sleep(600)"
FAULTY = "reduce = ranks.dist.all_reduce; ranks.dist.all_reduce = lambda x, *op: (reduce(x, *op), x.add_(1))"
RAISES = "ranks.dist.init_process_group = lambda *_, **__: 1 / 0"
# Under load processes start slowly.
PATIENT, IMPATIENT = 60.0, 20.0


@pytest.fixture(autouse=True)
def no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that leaves a rank running."""
    started = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr("lightning_megatron.cli.doctor.ping.subprocess.Popen", Recorded)
    yield
    assert all(process.returncode is not None for process in started)


def local_ping(limit_seconds: float = PATIENT) -> PingOutcome:
    return ping_locally(PingRequest(sizes_bytes=(100_000,), limit_seconds=limit_seconds), 2, has_gpus=False)


@pytest.mark.slow
def test_two_processes_reduce_and_are_timed() -> None:
    outcome = local_ping()
    assert not outcome.failure, outcome.failure
    assert (outcome.world, outcome.backend) == (2, "gloo")
    assert [timing.size_bytes for timing in outcome.timings] == [4, 100_000]
    for timing in outcome.timings:
        assert timing.bus_gb_per_second == pytest.approx(timing.size_bytes / timing.seconds / 1e9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "words"),
    [
        (KILLED, ("rank 1", "its process ended by signal SIGKILL", "last words")),
        (RAISES, ("the ping failed: rank 1, which had started: ZeroDivisionError",)),
        (FAULTY, ("the ping failed: rank 1", "the sum of 4 bytes over 2 ranks is wrong in 1 of 1 elements")),
    ],
    ids=["killed", "raises", "faulty"],
)
def test_a_rank_that_fails_ends_the_ping_early_with_the_cause(
    deed: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ping, "_PROGRAM", UNLIKE.format(deed))
    started_seconds = time.monotonic()
    outcome = local_ping()
    assert time.monotonic() - started_seconds < PATIENT
    for word in words:
        assert word in outcome.failure


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_ping_in_its_time_and_says_how_far_it_had_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ping, "_PROGRAM", UNLIKE.format(HANGS))
    started_seconds = time.monotonic()
    outcome = local_ping(IMPATIENT)
    assert time.monotonic() - started_seconds < 2 * IMPATIENT + 10
    assert "rank 1, which had joined the group of 2, was not done" in outcome.failure


def word() -> Word:
    return Word(host="node1", has_gpu=False, versions={})


def test_a_rank_that_does_not_come_ends_the_ping_in_its_time_and_is_named() -> None:
    launch = Launch(launcher="torchrun", rank=0, world=3, address="localhost", port=free_port())
    found = ping_launched(PingRequest(sizes_bytes=(4,), limit_seconds=0.5), launch, word())
    assert found is not None
    outcome, words = found
    assert outcome.failure == f"ranks 1 to 2 of 3 have not come to localhost:{launch.port} within 0.5 s"
    assert list(words) == [0]


def test_a_rank_without_the_first_one_says_so() -> None:
    launch = Launch(launcher="torchrun", rank=1, world=2, local_rank=1, address="127.0.0.1", port=free_port())
    with pytest.raises(NobodyThereError, match=f"rank 0 has not come to 127.0.0.1:{launch.port}"):
        ping_launched(PingRequest(sizes_bytes=(4,), limit_seconds=0.5), launch, word())


def test_a_listener_that_is_no_first_rank_is_left_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        launch = Launch(
            launcher="torchrun", rank=1, world=2, local_rank=1, address="127.0.0.1", port=other.getsockname()[1]
        )
        started = time.monotonic()
        with pytest.raises(NobodyThereError):
            ping_launched(PingRequest(sizes_bytes=(4,), limit_seconds=1.0), launch, word())
        assert time.monotonic() - started < 20


def test_a_port_that_another_holds_is_said() -> None:
    launch = Launch(launcher="SLURM", rank=0, world=2, address="127.0.0.1", port=free_port())
    timeout = ping.timedelta(seconds=5)
    holder = ping.TCPStore("127.0.0.1", launch.port, is_master=True, wait_for_workers=False, timeout=timeout)
    found = ping_launched(PingRequest(sizes_bytes=(4,), limit_seconds=0.5), launch, word())
    assert found is not None and holder.port == launch.port
    assert found[0].failure.startswith(f"the store at 127.0.0.1:{launch.port} cannot be used: ")
    assert "MASTER_PORT" in found[0].mend
