"""Layouts that other processes measure while a search measures the one that it asked for."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_megatron.mesh import Sizes
from lightning_megatron.planner.hardware import gpu_of
from lightning_megatron.planner.measured import Measured, UnmeasuredError, measured
from lightning_megatron.planner.measured_ahead import MeasuredAhead
from lightning_megatron.planner.presets import PRESETS
from lightning_megatron.planner.run import Run, RunSettings
from lightning_megatron.planner.search import search

PRESET = PRESETS["gpt2_124m"]
ONE = Run(model=PRESET.model, lengths=PRESET.lengths, sizes=Sizes(world=4), global_batch_size=16)
RUNS = [replace(ONE, micro_batch_size=size) for size in (1, 2, 4)]


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes beside this one."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def by_process(run: RunSettings) -> Measured:
    return Measured(memory=(), flops=os.getpid())


def test_runs_that_are_expected_are_measured_by_other_processes() -> None:
    ahead = MeasuredAhead(by_process)
    ahead.expect(iter(RUNS[1:]))
    # While these are not asked for, no others begin.
    ahead.expect(iter(RUNS[:1]))
    found = [ahead(run).flops for run in RUNS]
    assert found[0] == os.getpid() and len(set(found)) == 3


def test_with_one_thread_this_process_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    ahead = MeasuredAhead(by_process)
    ahead.expect(iter(RUNS))
    assert {ahead(run).flops for run in RUNS} == {os.getpid()}


def test_errors_of_other_processes_are_told() -> None:
    own = os.getpid()

    def refused(run: RunSettings) -> Measured:
        if run.micro_batch_size == 1:
            raise UnmeasuredError(f"refused by {os.getpid()}")
        if os.getpid() != own:
            os._exit(1)
        raise ArithmeticError(f"failed in {os.getpid()}")

    ahead = MeasuredAhead(refused)
    ahead.expect(iter(RUNS[:2]))
    with pytest.raises(UnmeasuredError, match=r"refused by \d+") as error:
        ahead(RUNS[0])
    assert str(own) not in str(error.value)
    with pytest.raises(ArithmeticError, match=f"failed in {own}"):
        ahead(RUNS[1])


def test_a_search_finds_the_same_however_many_processes_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = gpu_of("h100")

    def noted(run: RunSettings) -> Measured:
        (tmp_path / f"{os.getpid()}").touch()
        return measured(run)

    shared = search(ONE, gpu, memory_bytes=gpu.memory_bytes, num_confirmed=2, measure=noted)
    assert len(list(tmp_path.iterdir())) > 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert search(ONE, gpu, memory_bytes=gpu.memory_bytes, num_confirmed=2) == shared
