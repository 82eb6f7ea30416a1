"""Ranks of a benchmark are started and ended, and what they print comes back."""

import os
import time
from pathlib import Path

import pytest

from benchmarks import ranks
from benchmarks.ranks import RankFailed, RanksTooSlow, run_ranks

ECHO = """
import json, os
print("noise")
print(json.dumps([int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")]))
"""
# The second of two ranks fails; the first writes down who it is and would stay for a minute.
ONE_FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    time.sleep(0.3)
    sys.exit("the reason")
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(60)
"""
ALL_FAIL = """
import os, sys, time
time.sleep(0.3 * (1 - int(os.environ["RANK"])))
sys.exit("rank " + os.environ["RANK"])
"""


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_last_line_of_each_rank_comes_back_in_their_order() -> None:
    assert run_ranks(["-c", ECHO], 3, timeout_seconds=60) == [[rank, rank, 3, 1] for rank in range(3)]


def test_a_rank_that_fails_is_told_and_the_others_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 1.0)
    began = time.monotonic()
    with pytest.raises(RankFailed, match="the reason"):
        run_ranks(["-c", ONE_FAILS, str(tmp_path / "pid")], 2, timeout_seconds=50)
    assert time.monotonic() - began < 40
    assert not is_there(int((tmp_path / "pid").read_text()))


def test_of_several_failures_the_first_is_told() -> None:
    with pytest.raises(RankFailed, match="rank 1"):
        run_ranks(["-c", ALL_FAIL], 2, timeout_seconds=60)


def test_ranks_that_take_too_long_are_ended() -> None:
    with pytest.raises(RanksTooSlow, match="not done in 1 s"):
        run_ranks(["-c", "import time; time.sleep(60)"], 1, timeout_seconds=1)
