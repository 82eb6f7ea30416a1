"""The ways of saving that are compared save the same, and one that loses a number is not shown."""

import math
import mmap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checkpoint import AIMS, DCP, DCP_ASYNC, GATHERED, OURS, OURS_WAITING, ratio, report, sample_of
from benchmarks.saves import BYTES_OF_A_PARAMETER, MemoryPeak, Share, fill, is_right, run_rank, shapes_of, ways
from lightning_megatron.mesh import Mesh, Sizes
from tests.harness.ranks import run_on_ranks

SMALL = 300_000


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("way", ways())
def test_a_way_of_saving_brings_back_every_number(way: str, num_ranks: int, tmp_path: Path) -> None:
    sample = sample_of(run_on_ranks(num_ranks, run_rank, way, SMALL, 2, tmp_path, init=False))
    assert sample["is_right"]
    assert ("reshard" in sample) == (num_ranks == 2)
    assert 0.5 < sample["state_megabytes"] * 1e6 / SMALL < 2
    assert 0 < sample["wait"] <= sample["durable"] and 0 < sample["first_wait"] <= sample["first_durable"]
    # The save before is removed when the next one stands.
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["1"]


@pytest.mark.parametrize("num_bytes", [10**6, 10**8, 10**9, 10**10])
def test_a_state_has_about_the_bytes_that_were_asked_for(num_bytes: int) -> None:
    found = sum(map(math.prod, shapes_of(num_bytes).values())) * BYTES_OF_A_PARAMETER
    assert abs(found / num_bytes - 1) < 0.1


@pytest.mark.parametrize("cut", ["held", 0, 1])
def test_the_ranks_hold_everything_once_and_a_wrong_number_shows(cut: Any) -> None:
    shapes, times = shapes_of(SMALL), {}
    for rank in range(2):
        share = Share(Mesh.imagine(rank, Sizes(world=2)).world, shapes)
        pieces = share.held() if cut == "held" else share.shards(cut)
        fill(pieces, 3)
        assert is_right(pieces, 3) and not is_right(pieces, 4)
        for name, own in pieces.items():
            for piece in own:
                full = times.setdefault(name, torch.zeros(piece.global_shape))
                full[tuple(slice(o, o + s) for o, s in zip(piece.box.offsets, piece.box.sizes, strict=True))] += 1
        piece = own[-1]
        piece.tensor[(-1,) * piece.tensor.dim()] += 1
        assert not is_right(pieces, 3)
    assert len(times) == 3 * len(shapes)
    assert all((counts == 1).all() for counts in times.values())


def test_the_peak_is_what_came_on_top() -> None:
    # A tensor may lie where glibc keeps pages of tests before, which would be no more memory; a mapping is new.
    with MemoryPeak() as peak, mmap.mmap(-1, 80_000_000) as held:
        for _ in range(80):
            held.write(bytes(1_000_000))
        end = time.monotonic() + 60
        # It looks from time to time, and may have looked before all was written.
        while peak.num_bytes < 40e6 and time.monotonic() < end:
            time.sleep(0.01)
    assert 40e6 < peak.num_bytes < 120e6


def made_sample(wait: float, durable: float, is_right: bool = True) -> dict[str, Any]:
    return {
        "is_right": is_right,
        "state_megabytes": 100.0,
        "peak_megabytes": 50.0,
        "first_wait": 9.0,
        "wait": wait,
        "first_durable": 9.5,
        "durable": durable,
        "load": 1.0,
    }


def test_ratios_are_taken_within_rounds_and_aims_are_judged() -> None:
    samples = {
        OURS: [made_sample(s, 10 * s) for s in (0.1, 0.2, 0.4)],
        OURS_WAITING: [made_sample(1.0, 1.0)] * 3,
        GATHERED: [made_sample(s, s) for s in (10.0, 12.0, 16.0)],
        DCP: [made_sample(2.0, 2.0)] * 3,
        DCP_ASYNC: [made_sample(s, 3.0) for s in (0.1, 0.1, 0.1)],
    }
    assert ratio(samples, OURS, "wait", GATHERED, "wait") == pytest.approx(0.2 / 12)
    table, is_right = report(samples)
    assert is_right
    verdicts = [line.rpartition(": ")[2] for line in table.splitlines() if line.startswith("- ")]
    assert verdicts == ["met", "missed", "met", "met"]
    assert len(verdicts) == len(AIMS)
    assert "| ours | 9.000 | 0.200 | 9.500 | 2.000 | 1.000 |  | 0.50 |" in table


def test_a_way_that_brought_back_something_else_is_not_shown() -> None:
    table, is_right = report({OURS: [made_sample(0.125, 0.25, is_right=False)], DCP: [made_sample(1.0, 2.0)]})
    assert not is_right
    assert "| ours | wrong" in table and "0.125" not in table and "| DCP save | 9.000" in table


def test_a_sample_waits_for_the_last_rank_and_lists_the_first_save_apart() -> None:
    rank = {"state_bytes": 5e6, "peak_bytes": 1e6, "is_right": True, "load_seconds": 1.0}
    by_rank = [
        rank | {"wait_seconds": [5.0, 1.0, 3.0], "durable_seconds": [6.0, 2.0, 3.0]},
        rank | {"wait_seconds": [4.0, 2.0, 3.0], "durable_seconds": [7.0, 2.0, 5.0], "load_seconds": 2.0},
    ]
    assert sample_of(by_rank) == {
        "is_right": True,
        "state_megabytes": 10.0,
        "peak_megabytes": 2.0,
        "first_wait": 5.0,
        "wait": 2.5,
        "first_durable": 7.0,
        "durable": 3.5,
        "load": 2.0,
    }
