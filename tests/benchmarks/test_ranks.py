"""Ranks of a benchmark are started and ended, and what they print comes back."""

import os
from pathlib import Path

import pytest

from benchmarks import ranks
from benchmarks.ranks import RankFailed, RanksTooSlow, run_ranks

ECHO = """
import json, os
print("noise")
print(json.dumps([int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")]))
"""
# The first of two ranks writes down who it is and would stay for minutes; then the second fails.
ONE_FAILS = """
import os, pathlib, sys, time
path = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "1":
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
    sys.exit("the reason")
path.write_text(str(os.getpid()))
time.sleep(300)
"""
# The second fails; the first a second after the second is no more than its status.
ALL_FAIL = """
import os, pathlib, sys, time
path = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "1":
    path.write_text(str(os.getpid()))
    sys.exit("rank 1")
while not path.exists() or not path.read_text():
    time.sleep(0.01)
status = pathlib.Path("/proc", path.read_text(), "stat")
while status.exists() and ") Z " not in status.read_text():
    time.sleep(0.01)
time.sleep(1)
sys.exit("rank 0")
"""


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_last_line_of_each_rank_comes_back_in_their_order() -> None:
    assert run_ranks(["-c", ECHO], 3, timeout_seconds=60) == [[rank, rank, 3, 1] for rank in range(3)]


def test_a_rank_that_fails_is_reported_and_the_others_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 1.0)
    with pytest.raises(RankFailed, match="the reason"):
        run_ranks(["-c", ONE_FAILS, str(tmp_path / "pid")], 2, timeout_seconds=300)
    assert not is_there(int((tmp_path / "pid").read_text()))


def test_of_several_failures_the_first_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1"):
        run_ranks(["-c", ALL_FAIL, str(tmp_path / "pid")], 2, timeout_seconds=300)


def test_ranks_that_take_too_long_are_ended() -> None:
    with pytest.raises(RanksTooSlow, match="not done in 1 s"):
        run_ranks(["-c", "import time; time.sleep(60)"], 1, timeout_seconds=1)
