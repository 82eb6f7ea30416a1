"""The runs of models of experts that are compared do the same steps, and one that does other steps is not shown."""

import importlib.util
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.expert_layers import WAY_SHAPES, layer_run, variants
from benchmarks.experts import (
    PLAIN,
    SIZES,
    layer_rows,
    ratio_to_peers,
    report_layers,
    report_steps,
    rows,
    run_layers,
    run_rank,
    sample_of,
)
from benchmarks.yardstick import TOLERANCE, fault_of
from lightning_megatron.mesh import Mesh
from tests.harness.ranks import run_on_ranks

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None


@cache
def taken(row: str) -> dict[str, Any]:
    """A sample of the smallest size."""
    return sample_of(run_on_ranks(rows()[row].world, run_rank, row, "smoke", init=False, timeout=200))


@pytest.mark.parametrize("row", [row for row in rows() if row != PLAIN and not row.startswith("megatron-core")])
def test_a_row_takes_the_steps_of_plain_torch(row: str) -> None:
    if row.startswith("Hugging Face"):
        pytest.importorskip("transformers")
    sample, yardstick = taken(row), taken(PLAIN)
    assert fault_of(sample, yardstick, PLAIN) == ""
    assert min(sample["wall_seconds"], sample["cpu_seconds"], sample["peak_mb"]) > 0
    # It would show: losses of steps differ by more than the tolerance, so a step that was left out is a fault.
    losses = yardstick["losses"]
    stalled = sample | {"losses": [losses[0], losses[0], *losses[1:-1]]}
    assert "wrong: the loss of step 2" in fault_of(stalled, yardstick, PLAIN)


@pytest.mark.skipif(HAS_MEGATRON, reason="megatron-core is here")
def test_megatron_core_that_is_not_installed_is_left_out_with_its_reason() -> None:
    row = "megatron-core, one"
    table, is_right = report_steps({PLAIN: [taken(PLAIN)], row: [taken(row)]}, {PLAIN: 1, row: 1}, tokens=64)
    assert f"| {row} | 1 | megatron-core is not installed here" in table
    assert is_right


def test_each_variant_of_a_layer_is_timed_on_its_processes() -> None:
    for world in (1, 2):
        figures = run_on_ranks(world, run_layers, "smoke", 2, init=False, timeout=200)
        found = layer_rows(world, figures)
        assert [(row["shape"], row["variant"]) for row in found] == list(variants(world))
        assert all(len(row["cpu"]) == 2 and min(row["cpu"] + row["wall"]) > 0 for row in found)
        assert len(report_layers(found).splitlines()) == 2 + len(found)


@pytest.mark.parametrize("names", [("grouped", "one by one"), ("all-to-all", "all-gather")])
def test_variants_of_a_layer_compute_the_same(names: tuple[str, str]) -> None:
    first, second = (layer_run(32, 24, WAY_SHAPES[1], name, Mesh.single())() for name in names)
    for one, other in zip(first, second, strict=True):
        # Sums of up to 688 products in float32, taken in another order.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * one.abs().max().item())
        assert one.abs().max() > 1e-3


def made_sample(seconds: float, losses: tuple[float, ...] = (4.0, 3.0)) -> dict[str, Any]:
    taken = {"cpu_seconds": 2 * seconds, "wall_seconds": seconds, "peak_mb": 9.0}
    return taken | {"losses": list(losses), "busiest": 1.25, "torch": "2"}


@pytest.mark.parametrize(
    ("losses", "fault"),
    [
        ((4.0, 3.0), ""),
        ((4.0, 3.0 + 2 * TOLERANCE), ""),
        ((4.0, 3.0 + 4 * TOLERANCE), "wrong: the loss of step 2 is 3.000400, that of plain torch is 3.000000"),
        ((4.0, float("nan")), "wrong: the loss of step 2 is nan"),
        ((4.0,), "it took 1 steps, plain torch took 2"),
    ],
)
def test_a_row_is_shown_only_where_its_losses_are_those_of_plain_torch(losses: tuple[float, ...], fault: str) -> None:
    samples = {PLAIN: [made_sample(7.25)], "ours, one": [made_sample(2.5, losses)]}
    assert fault_of(samples["ours, one"][0], samples[PLAIN][0], PLAIN).startswith(fault)
    table, is_right = report_steps(samples, {PLAIN: 1, "ours, one": 1}, tokens=1000)
    assert is_right == (fault == "")
    assert ("| 400 |" in table) == ("| 1.25 |" in table.splitlines()[-1]) == (fault == "")


def test_a_row_is_held_against_the_better_peer_on_as_many_processes_round_by_round() -> None:
    worlds = {"Hugging Face, one": 1, "megatron-core, one": 1, "megatron-core, dp2": 2, "ours, one": 1, "ours, ep4": 4}
    seconds = {"Hugging Face, one": (6.0, 9.0, 4.0), "megatron-core, one": (3.0, 10.0, 5.0)}
    seconds |= {"megatron-core, dp2": (0.1, 0.1, 0.1), "ours, one": (2.0, 3.0, 4.0), "ours, ep4": (1.0, 1.0, 1.0)}
    samples = {row: [made_sample(s) for s in values] for row, values in seconds.items()}
    # 3/2, 9/3 and 4/4.
    assert ratio_to_peers(samples, worlds, "ours, one", "wall_seconds") == 1.5
    assert ratio_to_peers(samples, worlds, "ours, ep4", "wall_seconds") is None
    samples["Hugging Face, one"][1] = {"failed": "no luck"}
    assert ratio_to_peers(samples, worlds, "ours, one", "wall_seconds") == pytest.approx(1.5)
    assert ratio_to_peers(samples | {"megatron-core, one": [{"not_here": ""}] * 3}, worlds, "ours, one", "x") is None


def test_a_sample_is_the_median_step_of_all_ranks_without_warm_up() -> None:
    rank = {"losses": [4.0, 3.0, 2.0, 1.0, 1.0], "peak_mb": 5.0, "expert_rows": [], "torch": "2"}
    first = rank | {"cpu_seconds": [9.0, 1.0, 2.0, 3.0], "wall_seconds": [9.0, 1.0, 1.0, 1.0]}
    other = rank | {"cpu_seconds": [9.0, 1.0, 1.0, 1.0], "wall_seconds": [9.0, 2.0, 5.0, 4.0], "peak_mb": 7.0}
    sample = sample_of([first, other | {"losses": [2.0, 1.0, 2.0, 1.0, 1.0]}])
    assert (sample["cpu_seconds"], sample["wall_seconds"], sample["peak_mb"]) == (3.0, 4.0, 7.0)
    assert sample["losses"] == [3.0, 2.0, 2.0, 1.0, 1.0] and sample["busiest"] is None


def test_the_busiest_rank_is_found_call_by_call() -> None:
    rank = {"losses": [1.0], "peak_mb": 5.0, "torch": "2", "cpu_seconds": [1.0, 1.0], "wall_seconds": [1.0, 1.0]}
    # 6 of 4 in the mean in one call and 5 of 4 in the other, on another rank.
    sample = sample_of([rank | {"expert_rows": [6, 3]}, rank | {"expert_rows": [2, 5]}])
    assert sample["busiest"] == pytest.approx(11 / 8)


def test_a_row_that_failed_shows_why_and_counts_as_wrong() -> None:
    failed = {PLAIN: [made_sample(1.0)], "ours, one": [{"failed": "failed: out of luck"}]}
    table, is_right = report_steps(failed, {PLAIN: 1, "ours, one": 1}, tokens=1000)
    assert "| ours, one | 1 | failed: out of luck |" in table
    assert not is_right


def test_the_compared_model_has_the_size_it_is_said_to_have() -> None:
    size = SIZES["full"]
    assert (size["layers"], size["hidden"], size["heads"], size["sequence"], size["vocabulary"]) == (
        8,
        256,
        8,
        256,
        8192,
    )
    assert (size["experts"], size["top_k"], size["rows"], size["microbatch_rows"]) == (4, 2, 8, 2)
