"""What strangers say to the server of the failure watch neither ends nor steers a run, and costs it little memory."""

import contextlib
import json
import resource
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import lightning as L
import pytest

from lightning_megatron import MegatronStrategy
from lightning_megatron.trainer.fault_tolerance import failure_watch
from lightning_megatron.trainer.fault_tolerance.failure_server import FailureServer, Invitation
from lightning_megatron.trainer.fault_tolerance.failure_watch import FailureWatch
from lightning_megatron.trainer.fault_tolerance.lost_ranks import Process
from lightning_megatron.trainer.fault_tolerance.stop_vote import StopVote
from tests.harness.ranks import on_ranks
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small

TIMEOUT_SECONDS = 20.0
FAILURE = b'{"failure": "a stranger wants it to end"}\n'


@pytest.fixture(autouse=True)
def no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that knows a cause would end this process."""
    monkeypatch.setattr(failure_watch, "_GRACE_SECONDS", 1000.0)
    monkeypatch.setattr(failure_watch, "_LEAVE_SECONDS", 1000.0)


@pytest.fixture
def server() -> Iterator[FailureServer]:
    served = FailureServer(("127.0.0.1",), 2, TIMEOUT_SECONDS)
    served.start()
    yield served
    served.stop()


def watch_of(invitation: Invitation, rank: int) -> FailureWatch:
    """A watch of a rank other than the one that serves."""
    channel = failure_watch._connected(invitation, rank, TIMEOUT_SECONDS)
    watch = FailureWatch(channel, invitation.process, rank, StopVote(2), TIMEOUT_SECONDS)
    watch.start()
    return watch


def greeting(rank: int) -> bytes:
    return json.dumps(asdict(Process.own(rank))).encode()


def challenge_of(stranger: socket.socket) -> bytes:
    return stranger.makefile("rb").readline().strip()


def proof_of_another_token(server: FailureServer, stranger: socket.socket) -> bytes:
    invitation = replace(server.invitation, token=secrets.token_bytes(32))
    return invitation.proof(challenge_of(stranger), greeting(1)) + b" " + greeting(1) + b"\n"


def proof_of_another_challenge(server: FailureServer, stranger: socket.socket) -> bytes:
    """What somebody has overheard."""
    return server.invitation.proof(b"0" * 64, greeting(1)) + b" " + greeting(1) + b"\n"


def proof_of_another_greeting(server: FailureServer, stranger: socket.socket) -> bytes:
    return server.invitation.proof(challenge_of(stranger), greeting(1)) + b" " + greeting(0) + b"\n"


def says(line: bytes) -> Callable[[FailureServer, socket.socket], bytes]:
    return lambda server, stranger: line


STRANGERS = {
    "another token": proof_of_another_token,
    "another challenge": proof_of_another_challenge,
    "another greeting": proof_of_another_greeting,
    "no proof": says(greeting(1) + b"\n"),
    "nothing": says(b"\n"),
    "zeros": says(b"\0" * 100_000),
    "no text": says(bytes(range(256)) * 4 + b"\n"),
    "a request of a browser": says(b"GET / HTTP/1.1\r\nHost: rank0\r\n\r\n"),
    "deep nesting": says(b"[" * 100_000 + b"\n"),
    "a huge length": says(b"999999999999\n"),
    "no end of line": says(b"a"),
}


@pytest.mark.parametrize("name", list(STRANGERS))
def test_a_stranger_is_not_heard(name: str, server: FailureServer) -> None:
    invitation = server.invitation
    with socket.create_connection((invitation.host, invitation.port), 10) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(STRANGERS[name](server, stranger))
            stranger.sendall(FAILURE)
        watches = [watch_of(invitation, rank) for rank in (1, 0)]
        # Once all are here, nobody else is, and nobody comes any more.
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(1 << 16):
                pass
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((invitation.host, invitation.port), 10)
    assert not any(watch._is_settled.wait(0.1) for watch in watches)
    # They still hear each other.
    watches[0].publish(KeyError("a fault of rank 1"))
    assert watches[1]._is_settled.wait(10)
    cause = watches[1]._cause
    assert cause is not None and cause.rank == 1 and "a fault of rank 1" in cause.text
    for watch in watches:
        watch.stop()


def test_a_flood_of_strangers_costs_little_and_keeps_no_rank_out(server: FailureServer) -> None:
    invitation = server.invitation
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    strangers = []
    for _ in range(300):
        stranger = socket.create_connection((invitation.host, invitation.port), 10)
        stranger.setblocking(False)
        with contextlib.suppress(OSError):
            # All that the kernel takes.
            while stranger.send(b"a" * 65536):
                pass
        strangers.append(stranger)
    assert len(server._strangers) <= 66
    watches = [watch_of(invitation, rank) for rank in (0, 1)]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 20 * 1024
    for stranger in strangers:
        stranger.close()
    for watch in watches:
        watch.stop()


def test_a_rank_that_takes_its_leave_is_not_lost(server: FailureServer) -> None:
    first = watch_of(server.invitation, 0)
    second = failure_watch._connected(server.invitation, 1, TIMEOUT_SECONDS)
    second.send({"bye": True})
    second.close()
    assert not first._is_settled.wait(0.6)
    first.stop()


def test_a_rank_that_hangs_up_without_a_word_is_lost(server: FailureServer) -> None:
    first = watch_of(server.invitation, 0)
    failure_watch._connected(server.invitation, 1, TIMEOUT_SECONDS).close()
    assert first._is_settled.wait(10)
    assert first._cause is not None and list(first._cause.lost) == [1]
    first.stop()


class Looks(L.Callback):
    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, MegatronStrategy) and trainer.strategy._run is not None
        watch = trainer.strategy._run.watch
        assert watch is not None and watch._channel.socket.getpeername()[0] == "127.0.0.1"
        if watch._server is not None:
            assert watch._server.invitation.host == "127.0.0.1"
            deadline = time.monotonic() + 10
            while watch._server._listener.fileno() >= 0:
                assert time.monotonic() < deadline
                time.sleep(0.02)


@on_ranks(2, init=False)
def test_a_run_on_one_machine_is_watched_over_the_loopback_and_listens_to_nobody_else() -> None:
    make_trainer(Layout(world=2), callbacks=[Looks()], max_epochs=1).fit(Small(), Data())
