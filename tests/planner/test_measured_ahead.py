"""Layouts that other processes measure while a search measures the one that it asked for."""

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
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
OTHER = replace(ONE, micro_batch_size=8)
RUNS = [replace(ONE, micro_batch_size=size) for size in (1, 2, 4)]


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes beside this one."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def never(run: RunSettings) -> Measured:
    time.sleep(600)
    raise AssertionError("nobody asked for it")


def by_process(run: RunSettings) -> Measured:
    return Measured(memory=(), flops=os.getpid())


def test_runs_that_are_expected_are_measured_by_other_processes() -> None:
    with MeasuredAhead(by_process) as ahead:
        ahead.expect(RUNS)
        found = [ahead(run).flops for run in RUNS]
    assert found[0] == os.getpid() and len(set(found)) == 3


def test_what_is_expected_no_longer_makes_room_for_others() -> None:
    with MeasuredAhead(by_process) as ahead:
        ahead.expect(RUNS)
        ahead.expect([RUNS[0], OTHER])
        assert ahead(RUNS[1]).flops == os.getpid() != ahead(OTHER).flops


def test_other_processes_end_with_the_block() -> None:
    with MeasuredAhead(never) as ahead:
        ahead.expect(RUNS)
        assert len(multiprocessing.active_children()) == 2
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("platform", "threads"), [("linux", 1), ("darwin", 3)])
def test_this_process_measures_alone_with_one_thread_and_off_linux(
    platform: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(sys, "platform", platform)
    with MeasuredAhead(by_process) as ahead:
        ahead.expect(RUNS)
        assert {ahead(run).flops for run in RUNS} == {os.getpid()}


def test_this_process_measures_where_no_other_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: BaseProcess) -> None:
        raise BlockingIOError("no room for a process")

    monkeypatch.setattr(BaseProcess, "start", refuse)
    with MeasuredAhead(by_process) as ahead:
        ahead.expect(RUNS)
        assert {ahead(run).flops for run in RUNS} == {os.getpid()}


@pytest.fixture
def two_threads() -> Iterator[None]:
    """OpenMP has a second thread, which a fork has not."""
    torch.set_num_threads(2)
    torch.ones(1 << 21).exp()
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("two_threads")
def test_a_fork_runs_operations_that_take_several_threads() -> None:
    def threaded(run: RunSettings) -> Measured:
        torch.ones(1 << 21).exp()
        return by_process(run)

    with MeasuredAhead(threaded) as ahead:
        ahead.expect(RUNS)
        other = next(iter(ahead._begun.values()))
        assert other.connection.poll(30), "the fork waits for threads that it has not"


def test_errors_of_other_processes_are_told() -> None:
    own = os.getpid()

    def refused(run: RunSettings) -> Measured:
        if run.micro_batch_size == 1:
            raise UnmeasuredError(f"refused by {os.getpid()}")
        if os.getpid() != own:
            os._exit(1)
        raise ArithmeticError(f"failed in {os.getpid()}")

    with MeasuredAhead(refused) as ahead:
        ahead.expect([OTHER, *RUNS[:2]])
        with pytest.raises(UnmeasuredError, match=r"refused by \d+") as error:
            ahead(RUNS[0])
        assert str(own) not in str(error.value)
        with pytest.raises(ArithmeticError, match=f"failed in {own}"):
            ahead(RUNS[1])


def test_a_process_that_dies_while_it_sends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def send_half(self: Connection, found: object) -> None:
        # A length of bytes that do not follow.
        os.write(self.fileno(), (100).to_bytes(4, "big") + b"half")
        os._exit(1)

    monkeypatch.setattr(Connection, "send", send_half)
    with MeasuredAhead(by_process) as ahead:
        ahead.expect(RUNS)
        assert {ahead(run).flops for run in RUNS} == {os.getpid()}


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
