"""The optimizers that are compared do the same steps, and one that does other steps is not shown."""

import importlib.util
import re
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.optimizer import BARS, DDP, DEEPSPEED, KEPT, SIZES, report, rows, run_rank, sample_of
from benchmarks.replicas import Size, build_ours, make_model
from benchmarks.yardstick import TOLERANCE, fault_of
from tests.harness.ranks import run_on_ranks

STAGED = [(row, stage) for stage in BARS for row in rows(stage) if row != DDP and not row.startswith(DEEPSPEED)]


@cache
def taken(row: str, microbatches: int, stage: int = 1, size: str = "smoke") -> dict[str, Any]:
    """A sample of the smallest size on two ranks."""
    return sample_of(run_on_ranks(2, run_rank, row, stage, size, microbatches, init=False))


@pytest.mark.matrix
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(("row", "stage"), STAGED)
def test_a_row_takes_the_steps_of_ddp(row: str, stage: int, microbatches: int) -> None:
    size = "smoke" if stage == 1 else "llama smoke"
    sample, yardstick = taken(row, microbatches, stage, size), taken(DDP, microbatches, size=size)
    assert fault_of(sample, yardstick, DDP) == ""
    assert sample["wall_seconds"] > 0
    assert len(sample["cpu_seconds_by_rank"]) == 2
    # It would show: the loss falls by far more than the tolerance, so a step that was left out is a fault.
    losses = yardstick["losses"]
    stalled = sample | {"losses": [losses[0], losses[0], *losses[1:-1]]}
    assert "wrong: the loss of step 2" in fault_of(stalled, yardstick, DDP)
    assert losses[0] - losses[1] > 10 * TOLERANCE * losses[0]


def test_the_number_of_microbatches_leaves_the_loss_alone() -> None:
    assert fault_of(taken(DDP, 4), taken(DDP, 1), DDP) == ""


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is here")
def test_deepspeed_that_is_not_installed_is_left_out_with_its_reason() -> None:
    sample = taken("DeepSpeed ZeRO-1", 1)
    table, is_right = report({DDP: [taken(DDP, 1)], "DeepSpeed ZeRO-1": [sample]}, 1)
    assert "| DeepSpeed ZeRO-1 | DeepSpeed is not installed here" in table
    assert is_right


def test_our_model_has_the_weights_of_the_plain_one() -> None:
    size = Size(**SIZES["smoke"])
    plain, ours = make_model(size).double(), build_ours(size).double()
    tokens = torch.randint(size.vocabulary, (2, size.sequence))
    labels = tokens.roll(1, dims=1)
    loss = plain(tokens, labels)
    torch.testing.assert_close(ours(tokens, labels=labels), loss, rtol=1e-12, atol=0)
    qkv = plain.blocks[0].qkv
    qkv.weight.data = qkv.weight.data.roll(1, dims=0)
    assert abs(plain(tokens, labels) - loss) > 1e-8


def made_sample(cpu_seconds: float, losses: tuple[float, ...] = (4.0, 3.0)) -> dict[str, Any]:
    figures = {"cpu_seconds": cpu_seconds, "wall_seconds": 1.0, "peak_bytes": round(1e9 / cpu_seconds)}
    return {**figures, "losses": list(losses), "torch": "2"}


@pytest.mark.parametrize(
    ("losses", "fault"),
    [
        ((4.0, 3.0), ""),
        ((4.0, 3.0 + 2 * TOLERANCE), ""),
        ((4.0, 3.0 + 4 * TOLERANCE), "wrong: the loss of step 2 is 3.000400, that of torch DDP is 3.000000"),
        ((4.0, float("nan")), "wrong: the loss of step 2 is nan"),
        ((4.0,), "it took 1 steps, torch DDP took 2"),
    ],
)
def test_a_row_is_shown_only_where_its_losses_are_those_of_ddp(losses: tuple[float, ...], fault: str) -> None:
    samples = {DDP: [made_sample(7.25)], "ours": [made_sample(2.5, losses)]}
    assert fault_of(samples["ours"][0], samples[DDP][0], DDP).startswith(fault)
    table, is_right = report(samples, 1)
    assert is_right == (fault == "")
    assert ("2.500" in table) == (fault == "")
    assert "7.250" in table


def test_ratios_are_taken_within_rounds() -> None:
    samples = {DDP: [made_sample(s) for s in (1.0, 2.0, 4.0)], "ours": [made_sample(s) for s in (1.5, 4.0, 4.0)]}
    table, _ = report(samples, 1)
    [line] = [line for line in table.splitlines() if line.startswith("| ours")]
    assert re.findall(r"\d\.\d{3} ", line)[:2] == ["4.000 ", "1.500 "]


def test_a_row_is_held_against_the_better_of_those_that_free_as_it_does() -> None:
    seconds = {DDP: 1.0, "torch FSDP2": 2.0, f"torch FSDP2{KEPT}": 1.0, f"{DEEPSPEED}-3": 4.0, "ours": 3.0}
    table, _ = report({row: [made_sample(second)] for row, second in seconds.items()}, 3)
    [line] = [line for line in table.splitlines() if line.startswith("| ours")]
    # CPU to FSDP2's, the peak to DeepSpeed's, and nothing to what keeps parameters.
    assert [cell.strip() for cell in line.split("|")[2:8]] == ["3.000", "1.500", "", "1.333", "", "1.000"]


def test_a_row_that_failed_shows_why_and_counts_as_wrong() -> None:
    table, is_right = report({DDP: [made_sample(1.0)], "ours": [{"failed": "failed: out of luck"}]}, 1)
    assert "| ours | failed: out of luck |" in table
    assert not is_right
