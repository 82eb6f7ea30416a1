"""What a search expects of a layout is near what is measured of it."""

from dataclasses import replace

import pytest

from lightning_megatron.mesh import Sizes
from lightning_megatron.models import GPTConfig
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.planner.constants import fitted
from lightning_megatron.planner.forecast import FewSamples
from lightning_megatron.planner.hardware import gpu_of
from lightning_megatron.planner.measured import Measured, measured
from lightning_megatron.planner.measured_time import measured_time
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.run import Run, UnmeasuredError
from lightning_megatron.transformer.recompute import RecomputeConfig

H100 = gpu_of("h100")
RUN = Run(
    model=GPTConfig(num_layers=4, hidden_size=1024, num_attention_heads=8, vocab_size=8192, max_sequence_length=1024),
    lengths=SequenceLengths(sequence=1024),
    sizes=Sizes(world=4, tp=2, pp=2, sequence_parallel=True),
    global_batch_size=16,
    optimizer=OptimizerConfig(kind="distributed"),
)
FULL = RecomputeConfig(granularity="full")


class Noted:
    """Measures runs, and notes how many samples a microbatch of each has."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def __call__(self, run: Run) -> Measured:
        self.samples.append(run.micro_batch_size)
        return measured(run)


@pytest.mark.parametrize("samples", [1, 2, 4, 8])
def test_two_numbers_of_samples_tell_all_others(samples: int) -> None:
    run, noted = replace(RUN, micro_batch_size=samples), Noted()
    forecast = FewSamples(noted, H100, fitted())
    found, known = measured(run), forecast.memory(run)
    assert forecast.seconds(run) == pytest.approx(measured_time(run, found.ranks, H100, fitted()).total, rel=1e-3)
    for rank, memory in enumerate(found.memory):
        assert known[rank].static == memory.static
        assert known[rank].total == pytest.approx(memory.total, rel=0.02)
    # Each once, for memory and time together.
    assert noted.samples == ([1] if samples == 1 else [1, 2])


@pytest.mark.parametrize("samples", [1, 4])
def test_one_chunk_tells_of_several(samples: int) -> None:
    run, noted = replace(RUN, sizes=replace(RUN.sizes, vp=2), micro_batch_size=samples), Noted()
    forecast = FewSamples(noted, H100, fitted())
    found, known = measured(run), forecast.memory(run)
    assert forecast.seconds(run) == pytest.approx(measured_time(run, found.ranks, H100, fitted()).total, rel=0.02)
    for rank, memory in enumerate(found.memory):
        # The embedding and the head are on other ranks than they are with one chunk, or on chunks of their own.
        assert known[rank].static == pytest.approx(memory.static, rel=0.01)
        assert known[rank].total == pytest.approx(memory.total, rel=0.05)
    forecast.seconds(replace(run, sizes=replace(run.sizes, vp=1)))
    assert noted.samples == ([1] if samples == 1 else [1, 2])


def test_full_recomputation_takes_at_least_the_memory_and_about_the_time_that_is_expected() -> None:
    run = replace(RUN, micro_batch_size=4, recompute=FULL)
    forecast, found = FewSamples(measured, H100, fitted()), measured(run)
    assert forecast.seconds(run) == pytest.approx(measured_time(run, found.ranks, H100, fitted()).total, rel=0.05)
    plain, rest = forecast.seconds(replace(run, recompute=RecomputeConfig())), fitted().step_seconds
    assert forecast.seconds(run) - rest > 1.2 * (plain - rest)
    for rank, memory in forecast.memory(run).items():
        assert memory.static == found.memory[rank].static and memory.total <= found.memory[rank].total


def test_what_is_refused_is_refused_once_and_for_all_samples() -> None:
    tried = []

    def refuse(run: Run) -> Measured:
        tried.append(run)
        raise UnmeasuredError("no heads")

    forecast = FewSamples(refuse, H100, fitted())
    for run in (RUN, replace(RUN, micro_batch_size=4)):
        with pytest.raises(UnmeasuredError, match="no heads"):
            forecast.memory(run)
    assert len(tried) == 1
