"""Measurements on disk: what is read is what was measured, and what they depend on tells them apart."""

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_megatron.mesh import Sizes
from lightning_megatron.models import GPTConfig
from lightning_megatron.planner import plan_cache
from lightning_megatron.planner.measured import Measured, measured
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.plan_cache import PlanCache
from lightning_megatron.planner.run import Run

MODEL = GPTConfig(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256, max_sequence_length=32)
RUN = Run(model=MODEL, lengths=SequenceLengths(sequence=32), sizes=Sizes(world=2, pp=2), global_batch_size=4)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs that are measured."""
    found: list[Run] = []

    def noted(run: Run) -> Measured:
        found.append(run)
        return measured(run)

    monkeypatch.setattr(plan_cache, "measured", noted)
    return found


def test_what_was_measured_is_read_by_another_process(tmp_path: Path, runs: list[Run]) -> None:
    first = PlanCache(tmp_path).measured(RUN)
    assert first == measured(RUN) == PlanCache(tmp_path).measured(RUN)
    assert runs == [RUN]


def test_what_is_measured_is_announced_and_what_is_read_is_not(tmp_path: Path) -> None:
    announced: list[object] = []
    cache = PlanCache(tmp_path, announced.append)
    assert cache.measured(RUN) == cache.measured(RUN) and announced == [RUN]


def test_a_run_a_version_and_the_code_are_told_apart(
    tmp_path: Path, runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    wider = replace(RUN, micro_batch_size=2)
    PlanCache(tmp_path).measured(RUN)
    assert PlanCache(tmp_path).measured(wider) != PlanCache(tmp_path).measured(RUN)
    monkeypatch.setattr("torch.__version__", "3.0")
    PlanCache(tmp_path).measured(RUN)
    folder = tmp_path / "package"
    folder.mkdir()
    monkeypatch.setattr(plan_cache, "_PACKAGE", folder)
    PlanCache(tmp_path).measured(RUN)
    (folder / "new.py").write_text("")
    PlanCache(tmp_path).measured(RUN)
    assert runs == [RUN, wider, RUN, RUN, RUN]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"memory": [{"weight": 1}], "flops": 1}', '{"memory": 1}'])
def test_what_cannot_be_read_is_measured_anew(text: str, tmp_path: Path, runs: list[Run]) -> None:
    found = PlanCache(tmp_path).measured(RUN)
    [file] = tmp_path.iterdir()
    file.write_text(text)
    assert PlanCache(tmp_path).measured(RUN) == found and PlanCache(tmp_path).measured(RUN) == found
    assert runs == [RUN, RUN]
