"""Meters count what is held, and the most since they were set back."""

from pathlib import Path

import pytest
import torch

from lightning_megatron.trainer.callbacks import memory_meter
from lightning_megatron.trainer.callbacks.memory_meter import ResidentSoFarMeter, meter_of
from tests.harness.ranks import run_on_ranks

MEGABYTES = 2**20
# Large enough that the C library gives it back at once.
LARGE = 64 * MEGABYTES
CPU = torch.device("cpu")


def peaks() -> tuple[str, list[int]]:
    """Growth of the peak while a large tensor is there, after it has gone, and after setting back."""
    meter = meter_of(CPU)
    meter.reset()
    before, found = meter.peak_bytes(), []
    tensor = torch.ones(LARGE, dtype=torch.uint8)
    found.append(meter.peak_bytes() - before)
    del tensor
    found.append(meter.peak_bytes() - before)
    meter.reset()
    found.append(meter.peak_bytes() - before)
    return meter.name, found


def test_the_peak_of_a_process_is_set_back_where_the_system_allows_it() -> None:
    [(name, (there, gone, reset))] = run_on_ranks(1, peaks, init=False)
    # And what torch loads for its first tensor.
    assert LARGE <= there < 1.2 * LARGE and gone == pytest.approx(there, abs=MEGABYTES)
    assert name in ("resident", "resident_so_far")
    assert (reset < LARGE / 2) == (name == "resident")


def test_where_the_system_refuses_the_peak_is_that_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_meter, "_CLEAR", tmp_path / "no" / "such" / "file")
    meter = meter_of(CPU)
    assert isinstance(meter, ResidentSoFarMeter) and meter.name == "resident_so_far"
    before = meter.peak_bytes()
    meter.reset()
    assert meter.peak_bytes() >= before > 10 * MEGABYTES


@pytest.mark.gpu
def test_a_gpus_meter_counts_tensors() -> None:
    device = torch.device("cuda")
    meter = meter_of(device)
    meter.reset()
    before = meter.peak_bytes()
    tensor = torch.empty(LARGE, dtype=torch.uint8, device=device)
    del tensor
    assert meter.name == "allocated" and meter.peak_bytes() - before == LARGE
    assert meter.reserved_bytes() >= LARGE
    meter.reset()
    assert meter.peak_bytes() == before
