"""`lightning-megatron dry-run` as a user types it, and what it says to mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.cli.main import main

CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"
GPT_1T = str(CONFIGS / "gpt_1t.yaml")
SMALL = ("llama3_8b", "--world-size", "8", "--layout", "tp=4,pp=2", "--sequence-length", "512")


def told(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["dry-run", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err


def record(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert main(["dry-run", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_preset_runs_dry_and_tells_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry-run", *SMALL, "--global-batch-size", "4"]) == 0
    text = capsys.readouterr().out
    assert "rank 4, stage 0" in text and "rank 0, stage 1" in text
    assert "peak memory" in text and "main weights" in text and "all-gather" in text and "causal attention half" in text


def test_one_rank_as_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = record(capsys, *SMALL, "--global-batch-size", "4", "--rank", "1")
    [one] = found["ranks"]
    assert one["rank"] == 1 and one["stages"] == [1] and found["sizes"]["pp"] == 2
    assert sum(one["peak_by_kind"].values()) == one["peak_bytes"]
    sends = {m["kind"]: m["number"] for m in one["messages"] if m["axis"] == "pp"}
    # The gradient of each microbatch's input.
    assert sends == {"send": 4}


def test_full_recomputation_keeps_less_and_multiplies_more(capsys: pytest.CaptureFixture[str]) -> None:
    args = (*SMALL, "--global-batch-size", "4", "--rank", "4")
    [plain], [again] = (
        record(capsys, *args, "--sequence-length", "8192", *more)["ranks"] for more in ((), ("--recompute", "full"))
    )
    assert again["peak_bytes"] < plain["peak_bytes"]
    assert sum(again["flops"].values()) > 1.2 * sum(plain["flops"].values())


@pytest.mark.slow
def test_a_stage_of_a_trillion_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    [one] = record(capsys, GPT_1T, "--world-size", "3072", "--rank", "0")["ranks"]
    assert one["stages"] == [63] and one["parameters"] == pytest.approx(2.13e9, rel=0.01)
    # 6 bytes of weights and gradients, 12 of main weights and moments over 6 replicas.
    held = sum(size for kind, size in one["peak_by_kind"].items() if kind != "activations and others")
    assert held == pytest.approx(8 * one["parameters"], rel=0.001)
    assert one["microbatches_run"] == 66


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        ((GPT_1T, "--rank", "3072"), "--rank (3072) must be from 0 to world size - 1 (3071)"),
        ((GPT_1T, "--rank", "-1"), "--rank (-1) must be from 0 to"),
        ((GPT_1T, "--world-size", "3000"), "world size (3000) must be a multiple of"),
        ((GPT_1T, "--world-size", "0"), "--world-size (0) must be at least 1"),
        ((GPT_1T, "--layout", "tp=x"), "--layout part 'tp=x' must be one of"),
        (("llama3_8b",), "--world-size is needed"),
        (("llama3_8b", "--world-size", "8"), "llama3_8b has no layout of its own"),
        (("llama3_80b", "--world-size", "8", "--layout", "tp=8"), "llama3_80b"),
        (("gone.yaml",), "gone.yaml cannot be read"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], fault: str) -> None:
    message = told(capsys, *args)
    assert fault in message and message.count("\n") == 1
