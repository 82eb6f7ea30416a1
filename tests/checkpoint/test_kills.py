"""A process that saves ends by SIGKILL, at any call and at any moment: what it reported durable is there, complete.

Each round is a fork of a prepared process. Kills are before every call to the system and at every piece of a file, one
after the other, and at random moments. Ways to keep checkpoints that others go through as a part, and most of the
random moments, come under `pytest --whole` alone.
"""

import os
import random
import shutil
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.checkpoint import Saver, atomic_directory, chunk_file, is_checkpoint
from lightning_megatron.checkpoint.atomic_directory import REMOVED, REPLACED, UNFINISHED
from tests.checkpoint.steps import ALONE, meta_of, state_of, step_in, visible
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import WHOLE


@dataclass(frozen=True)
class Way:
    """How a run keeps its checkpoints."""

    keeps: str
    # "one path", written over; "new paths", the old removed; or "a link" to the newest of them too
    in_background: bool = False
    """Saved in the background."""
    can_exchange: bool = True
    """Two names in one step."""


WAYS = {
    "one path": Way("one path"),
    "one path, in background": Way("one path", in_background=True),
    "one path, no exchange": Way("one path", can_exchange=False),
    "new paths": Way("new paths"),
    "new paths, in background": Way("new paths", in_background=True),
    "a link": Way("a link"),
    "a link, in background": Way("a link", in_background=True),
}
# With a link to them new paths are saved and removed alike.
SAMPLED = [way for way in WAYS if WHOLE in os.environ or WAYS[way].keeps != "new paths"]
ROUNDS = 25 if WHOLE in os.environ else 6


def keep_saving(folder: Path, way: Way, steps: range, report: Callable[[int], None]) -> None:
    """Saves each step and reports it when it is durable."""
    saver = Saver(ALONE)
    for step in steps:
        path = folder / ("last.ckpt" if way.keeps == "one path" else f"step={step}.ckpt")
        saver.save(path, state_of(step), meta_of(step), wait=not way.in_background)
        # A save waits for the one before.
        report(step - 1 if way.in_background else step)
        for old in folder.glob("step=*.ckpt"):
            if old != path:
                saver.remove(old)
        if way.keeps == "a link":
            link = folder / "last.ckpt"
            if link.is_symlink():
                os.remove(link)
            os.symlink(path.name, link)
    saver.wait()
    report(steps[-1])


class Points:
    """Calls that a process goes through, at one of which it ends."""

    def __init__(self, deadly: int) -> None:
        self.deadly = deadly
        self.passed = 0

    def reach(self) -> None:
        self.passed += 1
        if self.passed == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, call: Callable[..., Any], *, has_writes_after: bool = False) -> Callable[..., Any]:
        """The call, with a point before it and, where writes come after it, one after it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.reach()
            result = call(*args, **kwargs)
            if has_writes_after:
                self.reach()
            return result

        return run

    def set_up(self) -> None:
        """In this process, which is a fork for one round."""
        # After a call the disk is as before the next one.
        for name in ("mkdir", "rename", "unlink", "remove", "rmdir", "symlink", "open"):
            setattr(os, name, self.around(getattr(os, name)))
        # What is written survives the process without it, and it takes long.
        os.fsync = self.around(lambda descriptor: None)
        atomic_directory._exchange = self.around(atomic_directory._exchange)
        # A file is empty when it is made, and what is written to it comes before the next call.
        atomic_directory.open = self.around(open, has_writes_after=True)  # type: ignore[attr-defined]
        write, num_writes = chunk_file._Counter.write, iter(range(10**6))

        def write_some(stream: Any, data: Any) -> int:
            # A tensor comes in some twenty parts, most of them alike.
            if next(num_writes) % 5 == 0:
                self.reach()
            return write(stream, data)

        chunk_file._Counter.write = write_some  # type: ignore[method-assign]


def in_a_fork(work: Callable[[Callable[[int], None]], None], kill_after_seconds: float | None = None) -> list[int]:
    """What the work reported before its process ended, by SIGKILL or well."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(lambda number: _report(writer, number))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    os.close(writer)
    if kill_after_seconds is not None:
        time.sleep(kill_after_seconds)
        os.kill(child, signal.SIGKILL)
    with open(reader, "rb") as stream:
        reported = stream.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL), "the saving process failed by itself"
    return [number for (number,) in struct.iter_unpack("q", reported)]


def _report(writer: int, number: int) -> None:
    os.write(writer, struct.pack("q", number))


def check(folder: Path, way: Way, durable: int, tally: Counter[str]) -> int:
    """The newest complete step that is there, not older than the one reported durable. Clears up what is hidden."""
    steps = []
    for path in visible(folder):
        if path.is_symlink() and not path.exists():
            # Made when the old one is gone or before the new one is there; the checkpoint stands by its own name.
            tally["links to what is not there"] += 1
            continue
        assert is_checkpoint(path), f"{path} is visible and not complete"
        steps.append(step_in(path))
    for path in folder.glob(".*"):
        assert path.name in (UNFINISHED, REPLACED, REMOVED)
        for aside in path.glob("*/*"):
            assert aside.parent.parent == path and len(aside.parent.name) == 16 and aside.name.endswith(".ckpt")
            try:
                found = step_in(aside)
            except (ValueError, RuntimeError):
                tally[f"partial in {path.name}"] += 1
                # What was reported durable and set aside is complete, until the new one is.
                assert path.name != REPLACED or steps
            else:
                tally[f"complete in {path.name}"] += 1
                if path.name == REPLACED:
                    back = folder / aside.name
                    if not back.exists():
                        os.rename(aside, back)
                        steps.append(found)
        shutil.rmtree(path)
    newest = max(steps, default=0)
    assert newest >= durable, f"step {durable} was reported durable, and what is there is of step {newest}"
    return newest


def killed_at_each_call(folder: Path, way: Way) -> Counter[str]:
    """One round for each point of a save over an older one or next to it."""
    if not way.can_exchange:
        atomic_directory._exchange = lambda one, other: False
    tally: Counter[str] = Counter()
    keep_saving(folder, way, range(1, 2), lambda step: None)
    durable = 1

    def counted(report: Callable[[int], None]) -> None:
        points = Points(0)
        points.set_up()
        keep_saving(folder, way, range(2, 3), lambda step: None)
        report(points.passed + 1)

    [num_points] = in_a_fork(counted)
    for step, point in enumerate(range(1, num_points + 1), start=3):

        def dies(report: Callable[[int], None], step: int = step, point: int = point) -> None:
            points = Points(point)
            points.set_up()
            keep_saving(folder, way, range(step, step + 1), report)
            # The last point comes after the last call.
            points.reach()

        # Reports of the step before are of another round.
        reported = [number for number in in_a_fork(dies) if number == step]
        tally["ended well" if reported else "kills"] += 1
        durable = check(folder, way, max([durable, *reported]), tally)
    return tally


def killed_at_random(folder: Path, way: Way, rounds: int) -> Counter[str]:
    """Rounds of a fork that saves on and on, with real flushes to the disk, until it is ended."""
    chance, tally = random.Random(way.keeps + str(way.in_background)), Counter[str]()
    began_seconds = time.monotonic()
    in_a_fork(lambda report: keep_saving(folder, way, range(1, 4), report))
    # A disk may need long for a flush: the kill is to come after some saves.
    most_seconds = max(0.2, time.monotonic() - began_seconds)
    durable, last = check(folder, way, 3, tally), 3
    for _ in range(rounds):
        steps = range(last + 1, last + 10000)
        seconds = chance.uniform(0.0, most_seconds)
        reported = in_a_fork(
            lambda report, steps=steps: keep_saving(folder, way, steps, report), kill_after_seconds=seconds
        )
        reported = [number for number in reported if number in steps]
        tally["kills"] += 1
        tally["steps"] += len(reported)
        durable = check(folder, way, max([durable, *reported]), tally)
        # Those that were begun and not reported are not used again.
        last = max([last, durable, *reported]) + 3
    return tally


@pytest.mark.matrix
@pytest.mark.parametrize("way", SAMPLED)
def test_killed_at_each_call_the_durable_checkpoint_stands(way: str, tmp_path: Path) -> None:
    [tally] = run_on_ranks(1, killed_at_each_call, tmp_path, WAYS[way], init=False, timeout=240)
    assert tally["kills"] > 40
    assert tally["partial in .unfinished"] > 20
    if WAYS[way].keeps == "one path" and WAYS[way].can_exchange:
        # The old one, after the two changed places.
        assert tally["complete in .unfinished"] > 0
    if not WAYS[way].can_exchange:
        assert tally["complete in .replaced"] > 0
    if WAYS[way].keeps != "one path":
        assert tally["partial in .removed"] > 0


@pytest.mark.matrix
@pytest.mark.parametrize("way", [way for way in SAMPLED if WAYS[way].can_exchange])
def test_killed_at_random_moments_the_durable_checkpoint_stands(way: str, tmp_path: Path) -> None:
    [tally] = run_on_ranks(1, killed_at_random, tmp_path, WAYS[way], ROUNDS, init=False, timeout=240)
    assert tally["kills"] == ROUNDS
    assert tally["steps"] > 0
