"""A watch whose ranks are connected by a tree hears all that one with a single server hears."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lightning_megatron.comm.tree_axis import tree_over
from lightning_megatron.mesh import Axis
from lightning_megatron.trainer.fault_tolerance import failure_watch
from lightning_megatron.trainer.fault_tolerance.failure_watch import FailureWatch
from lightning_megatron.trainer.fault_tolerance.lost_ranks import Cause
from lightning_megatron.trainer.fault_tolerance.stop_vote import StopVote
from tests.harness.threads import ThreadGroup, new_group, run_on_threads

TIMEOUT_SECONDS = 20.0
SOON_SECONDS = 10.0
# Rank 0 has 1 and 2; 1 has 3 and 4; 2 has 5 and 6.
WORLD, FAN_OUT = 7, 2


@pytest.fixture(autouse=True)
def no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that knows a cause would end this process."""
    monkeypatch.setattr(failure_watch, "_GRACE_SECONDS", 1000.0)
    monkeypatch.setattr(failure_watch, "_LEAVE_SECONDS", 1000.0)


def watched(world: ThreadGroup, act: Callable[[FailureWatch, StopVote, int], Any], done: threading.Barrier) -> Any:
    """What a rank has of what it does while all are watched; all of them leave together."""
    ranks = Axis("world", world.size(), world.global_rank, world.ranks, world)
    vote = StopVote(WORLD)
    tree = tree_over(ranks, new_group, FAN_OUT)  # type: ignore[arg-type]
    watch = FailureWatch.started(None, ranks, vote, TIMEOUT_SECONDS, tree=tree)
    try:
        return act(watch, vote, world.global_rank)
    finally:
        done.wait(SOON_SECONDS)
        watch.stop()


def until(is_so: Callable[[], Any]) -> Any:
    until_seconds = time.monotonic() + SOON_SECONDS
    while not (found := is_so()) and time.monotonic() < until_seconds:
        time.sleep(0.01)
    return found


def cause_after(act: Callable[[FailureWatch], None], which: int) -> list[Cause | None]:
    """What each rank knows once one of them has done something."""

    def run(watch: FailureWatch, vote: StopVote, rank: int) -> Cause | None:
        if rank == which:
            act(watch)
        found: Cause | None = until(lambda: watch._cause)
        return found

    return run_on_threads(WORLD, watched, run, threading.Barrier(WORLD))


def fail(watch: FailureWatch) -> None:
    watch._is_failing = True
    watch._post({"failure": "KeyError: broken"})


def die(watch: FailureWatch) -> None:
    """The kernel closes the connections of a process that ends."""
    watch._stop.set()
    watch._channel.socket.shutdown(socket.SHUT_RDWR)
    watch._thread.join()
    watch._wake.close()
    watch._waking.close()


@pytest.mark.parametrize("rank", [0, 2, 3, 6])
def test_a_failure_is_told_to_all_with_the_rank_that_failed(rank: int) -> None:
    for cause in cause_after(fail, rank):
        assert cause is not None and cause.rank == rank
        assert cause.text.startswith(f"rank {rank} failed:\nKeyError: broken")


@pytest.mark.parametrize("rank", [4, 5])
def test_a_rank_that_is_gone_is_named_to_all(rank: int) -> None:
    by_rank = cause_after(die, rank)
    for other in set(range(WORLD)) - {rank}:
        cause = by_rank[other]
        assert cause is not None and list(cause.lost) == [rank]
        assert cause.text.startswith(f"rank {rank} (process ") and "was killed or crashed" in cause.text


def stops(watch: FailureWatch, vote: StopVote, rank: int) -> tuple[str | None, int]:
    """Passes stop points, some ranks further than others, until all stop; rank 6 asks for it."""
    point = 0
    if rank == 6:
        vote.ask("SIGUSR1")
    while (reason := vote.reason_to_stop(point)) is None:
        point += 1
        time.sleep(0.02 * (1 + rank % 3))
    return reason, point


def test_a_vote_to_stop_reaches_all_and_ends_at_one_point() -> None:
    stopped = run_on_threads(WORLD, watched, stops, threading.Barrier(WORLD))
    assert len(set(stopped)) == 1 and stopped[0][0] == "SIGUSR1"


def test_ranks_meet() -> None:
    def meets(watch: FailureWatch, vote: StopVote, rank: int) -> bool:
        return watch.meets()

    assert run_on_threads(WORLD, watched, meets, threading.Barrier(WORLD)) == [True] * WORLD


@pytest.mark.parametrize("absent", [None, 0, 5])
def test_ranks_that_wait_hear_of_one_that_has_passed(absent: int | None) -> None:
    def waits(watch: FailureWatch, vote: StopVote, rank: int) -> int | None:
        watch.has_passed = lambda place: place == "here" and rank == absent
        # All are connected after this, as they are before a step.
        assert watch.meets()
        return absent if rank == absent else watch.absent_at("here")

    assert run_on_threads(WORLD, watched, waits, threading.Barrier(WORLD)) == [absent] * WORLD


def test_a_rank_talks_to_its_parent_and_its_children() -> None:
    def peers(watch: FailureWatch, vote: StopVote, rank: int) -> int:
        until(lambda: watch._server is None or not watch._server._missing)
        return 0 if watch._server is None else len(watch._server._peers)

    assert run_on_threads(WORLD, watched, peers, threading.Barrier(WORLD)) == [3, 2, 2, 0, 0, 0, 0]


def test_a_server_listens_where_this_machine_reaches_the_first() -> None:
    assert failure_watch._own_addresses(["127.0.0.1"]) == ["127.0.0.1"]
    # There is no way to it: the server will say so.
    assert failure_watch._own_addresses(["no address"]) == ["no address"]
