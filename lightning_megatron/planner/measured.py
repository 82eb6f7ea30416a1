"""What a run holds and multiplies, measured: a dry run of one rank of each pipeline rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_megatron.planner.balanced_runs import fullest_line
from lightning_megatron.planner.dry_rank import Rank, Trained
from lightning_megatron.planner.dry_run import DryRun, DryRuns, global_rank
from lightning_megatron.planner.dry_step import DryStep
from lightning_megatron.planner.held_tensors import HeldTensors, held_tensors
from lightning_megatron.planner.memory import WORKSPACE_BYTES, Memory, with_overhead
from lightning_megatron.planner.memory_tracker import OTHERS
from lightning_megatron.planner.module_turns import ModuleTurns
from lightning_megatron.planner.run import Run, RunSettings
from lightning_megatron.planner.step_trace import Level, Passes
from lightning_megatron.planner.step_work import StepWork


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """What a pipeline rank does, for the time model."""

    passes: Passes
    """In the forward and in the backward of one microbatch."""
    trained: tuple[int, int]
    """Number of dense and of expert parameters that it trains."""
    num_layers: int
    step: StepWork
    """What the optimizer's step takes."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Memory of each pipeline rank, first stage first, and FLOPs of a step on all GPUs together."""

    memory: tuple[Memory, ...]
    flops: float | None
    """None under dynamic context parallelism, where ranks differ."""
    ranks: tuple[RankWork, ...] = ()
    """What each pipeline rank does."""


Measure = Callable[[Any], Measured]
"""Measures a run without errors. Raises UnmeasuredError where what it trains does not run on its ranks."""


@lru_cache(maxsize=256)
def measured(run: RunSettings, trained: Trained | None = None) -> Measured:
    """Measurement of a run without errors; of ranks that share a stage, that of the fullest. A `Run` has its own
    model."""
    ranks, pp = DryRuns(run, trained), run.sizes.pp
    found = [ranks.of(global_rank(run, index, fullest_line(run, index))) for index in range(pp)]
    flops = sum(sum(one.flops.values()) for one in found) * run.sizes.world / pp
    return Measured(
        memory=tuple(map(_memory_of, found)),
        flops=flops if run.balanced is None else None,
        ranks=tuple(
            RankWork(passes=one.passes, trained=one.trained, num_layers=one.num_layers, step=one.step) for one in found
        ),
    )


def measured_levels(run: RunSettings, pp_rank: int, trained: Trained | None = None) -> list[Level]:
    """What the fullest rank of a pipeline rank holds in each piece of a step of all microbatches, in order."""
    return DryRuns(run, trained, walks_all=True).levels(global_rank(run, pp_rank, fullest_line(run, pp_rank)))


def measured_held(run: RunSettings, pp_rank: int, trained: Trained | None = None) -> list[HeldTensors]:
    """What the fullest rank of a pipeline rank holds at its peak, by module and line of code, the most bytes first. The
    run must have microbatches that are alike."""
    return held_tensors(run, global_rank(run, pp_rank, fullest_line(run, pp_rank)), trained)


def measured_modules(run: RunSettings, pp_rank: int, trained: Trained | None = None) -> Mapping[str, Passes]:
    """What a forward and a backward of one microbatch do on a pipeline rank, by module. The run must have microbatches
    that are alike."""

    def watch(own: Rank, step: DryStep) -> None:
        turns = ModuleTurns(step.take_turns)
        step.module_of = lambda: turns.current
        turns.follow_backwards(own.module, own.weight_gradients)

    return DryRuns(run, trained, watch=watch).of(global_rank(run, pp_rank, fullest_line(run, pp_rank))).modules


@lru_cache(maxsize=16)
def measured_rank(run: Run, pp_rank: int) -> Memory:
    """Memory of one pipeline rank of a run without errors, as `measured` has it."""
    return _memory_of(DryRuns(run).of(global_rank(run, pp_rank, fullest_line(run, pp_rank))))


def _memory_of(one: DryRun) -> Memory:
    kinds = dict(one.peak_by_kind)
    memory = Memory(
        weights=kinds.get("weights", 0),
        gradients=kinds.get("gradients", 0),
        master_weights=kinds.get("master weights", 0),
        moments=kinds.get("moments", 0),
        activations=one.saved_bytes,
        buffers=kinds.get(OTHERS, 0) - one.saved_bytes + WORKSPACE_BYTES,
        host=one.host_bytes,
    )
    return with_overhead(memory)
