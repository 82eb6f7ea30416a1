"""A rank that is killed, frozen or cut off ends every other rank in time, and they name it.

The ranks that are left wait in a collective of torch, or are busy with something else for long.
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_megatron import MegatronStrategy
from lightning_megatron.trainer.fault_tolerance import failure_watch
from lightning_megatron.trainer.fault_tolerance.lost_ranks import Process, gone_sentence, silent_sentence
from tests.harness import ranks
from tests.harness.ranks import RankFailed, run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small
from tests.trainer.trees import talk_by_tree

TIMEOUT_SECONDS = 4.0
# What a rank may take on top of the time-out until it has ended.
MORE_SECONDS = 15.0
# Nothing else ends a rank before that.
LONG_SECONDS = 50.0
WORLD = 3
# How Linux calls a network of one's own.
CLONE_NEWNET = 0x40000000


class SecondBatch(L.Callback):
    """Loses one rank in the second batch; the others wait for it, or are busy for long."""

    def __init__(self, rank: int, folder: Path, *, others_are_busy: bool) -> None:
        self.rank, self.folder, self.others_are_busy = rank, folder, others_are_busy

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        if trainer.global_rank == self.rank:
            (self.folder / "lost").write_text(str(os.getpid()))
            self.lose()
        elif self.others_are_busy:
            time.sleep(LONG_SECONDS)

    def lose(self) -> None:
        raise NotImplementedError


class GetsSignal(SecondBatch):
    def __init__(self, number: int, rank: int, folder: Path, *, others_are_busy: bool) -> None:
        super().__init__(rank, folder, others_are_busy=others_are_busy)
        self.number = number

    def lose(self) -> None:
        os.kill(os.getpid(), self.number)


class CutsLink(SecondBatch):
    def lose(self) -> None:
        subprocess.run(["ip", "link", "set", "first", "down"], check=True)


def fit(lost: SecondBatch, world: int, **options: Any) -> None:
    # Where a rank has to be ended, it is given less time before that.
    failure_watch._GRACE_SECONDS = 1.0  # type: ignore[attr-defined]
    strategy = MegatronStrategy(timeout_seconds=TIMEOUT_SECONDS)
    make_trainer(Layout(world=world), strategy=strategy, callbacks=[lost], **options).fit(Small(), Data(24, batch=6))


def fit_until_signal(number: int, rank: int, folder: Path, others_are_busy: bool, fan_out: int) -> None:
    talk_by_tree(fan_out)
    fit(GetsSignal(number, rank, folder, others_are_busy=others_are_busy), WORLD)


def fit_until_cut(folder: Path) -> None:
    """Two ranks in networks of their own, with one link between them."""
    rank = int(os.environ["RANK"])
    name, other = ("first", "second") if rank == 0 else ("second", "first")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        pytest.skip(f"this process may not have a network of its own: {os.strerror(ctypes.get_errno())}")
    (folder / name).write_text(str(os.getpid()))
    until_there(folder / other)
    if rank == 0:
        link = f"ip link add first type veth peer name second netns {(folder / other).read_text()}"
        subprocess.run(link.split(), check=True)
        (folder / "link").touch()
    until_there(folder / "link")
    for command in ("lo up", f"{name} up"):
        subprocess.run(["ip", "link", "set", *command.split()], check=True)
    subprocess.run(["ip", "address", "add", f"10.77.0.{1 + rank}/24", "dev", name], check=True)
    os.environ.update(
        LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank), GROUP_WORLD_SIZE="2", MASTER_ADDR="10.77.0.1",
        GLOO_SOCKET_IFNAME=name,
    )  # fmt: skip
    fit(CutsLink(0, folder, others_are_busy=True), 1, num_nodes=2)


def until_there(path: Path) -> None:
    while not path.exists() or (path.name != "link" and not path.read_text()):
        time.sleep(0.02)


class Ends:
    """When each rank has ended; lets a frozen one go on once all others have."""

    def __init__(self, lost: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at_seconds: dict[int, float] = {}
        receive = ranks._receive

        def recording(connection: Connection, process: BaseProcess, rank: int) -> ranks.Report:
            self.at_seconds[rank] = time.time()
            if set(range(WORLD)) - self.at_seconds.keys() == {lost}:
                os.kill(int(path.read_text()), signal.SIGCONT)
            return receive(connection, process, rank)

        monkeypatch.setattr(ranks, "_receive", recording)
        # The harness ends nobody before that.
        monkeypatch.setattr(ranks, "GRACE_SECONDS", LONG_SECONDS)


# With one child each, rank 1 has the server of rank 2.
@pytest.mark.parametrize(
    ("number", "rank", "others_are_busy", "fan_out"),
    every_nth(
        [
            (signal.SIGKILL, 0, True, 8),
            (signal.SIGKILL, 1, False, 8),
            (signal.SIGKILL, 1, True, 1),
            (signal.SIGKILL, 2, True, 1),
            (signal.SIGSTOP, 1, True, 8),
            (signal.SIGSTOP, 0, False, 8),
            (signal.SIGSTOP, 2, False, 1),
            (signal.SIGSTOP, 1, True, 1),
            (signal.SIGSTOP, 0, True, 1),
        ],
        2,
    ),
)
def test_a_lost_rank_ends_the_others_and_is_named(
    number: signal.Signals,
    rank: int,
    others_are_busy: bool,
    fan_out: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    ends = Ends(rank, tmp_path / "lost", monkeypatch)
    with pytest.raises(RankFailed):
        run_on_ranks(WORLD, fit_until_signal, number, rank, tmp_path, others_are_busy, fan_out, init=False)
    lost_seconds = (tmp_path / "lost").stat().st_mtime
    printed = capfd.readouterr().out
    what = "was killed or crashed" if number == signal.SIGKILL else r"has not answered for \d+ s \(timeout_seconds=4\)"
    for other in {0, 1, 2} - {rank}:
        assert ends.at_seconds[other] - lost_seconds < TIMEOUT_SECONDS + MORE_SECONDS
        assert re.search(
            rf"\[rank {other}\] rank {other} ends because rank {rank} \(process \d+ on \S+\) {what}", printed
        )
    # A frozen rank that goes on finds itself alone, and ends too.
    assert len(ends.at_seconds) == WORLD


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("ip") is None, reason="networks are made by Linux's ip")
def test_a_cut_link_ends_the_ranks_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ends = Ends(-1, tmp_path, monkeypatch)
    with pytest.raises(RankFailed):
        run_on_ranks(2, fit_until_cut, tmp_path, init=False)
    lost_seconds = (tmp_path / "lost").stat().st_mtime
    printed = capfd.readouterr().out
    for rank in range(2):
        assert ends.at_seconds[rank] - lost_seconds < TIMEOUT_SECONDS + MORE_SECONDS
        assert f"[rank {rank}] rank {rank} ends because rank {1 - rank} (process" in printed
    assert printed.count("has not answered for") >= 2 and "or its machine or the network to it is lost" in printed


def test_sentences_name_each_rank_and_machine_and_no_more_than_fit() -> None:
    processes = [Process(rank=rank, host=f"node{rank % 2}", pid=100 + rank) for rank in range(40)]
    assert gone_sentence(processes[:1]).startswith("rank 0 (process 100 on node0) was killed or crashed: its process")
    assert gone_sentence(processes[:3]).startswith("ranks 0, 1, 2 (on node0, node1) were killed or crashed: their")
    assert "13, 14, 15 and 24 more (on node0, node1) have not answered for 9 s" in silent_sentence(processes, 9.4, 8.5)
    assert silent_sentence([Process(rank=3)], 9.4, 8.5).startswith("rank 3 has not answered")
