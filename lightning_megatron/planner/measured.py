"""What a run holds and multiplies, measured: a dry run of one rank of each pipeline rank."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from lightning_megatron.planner.balanced_runs import fullest_line
from lightning_megatron.planner.dry_run import DryRun, DryRuns, global_rank
from lightning_megatron.planner.memory import WORKSPACE_BYTES, Memory, with_overhead
from lightning_megatron.planner.memory_tracker import OTHERS
from lightning_megatron.planner.run import Run


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Memory of each pipeline rank, first stage first, and FLOPs of a step on all GPUs together."""

    memory: tuple[Memory, ...]
    flops: float | None
    """None under dynamic context parallelism, where ranks differ."""


Measure = Callable[[Run], Measured]
"""Measures a run without errors."""


@lru_cache(maxsize=256)
def measured(run: Run) -> Measured:
    """Measurement of a run without errors; of ranks that share a stage, that of the fullest."""
    ranks, pp = DryRuns(run), run.sizes.pp
    found = [ranks.of(global_rank(run, index, fullest_line(run, index))) for index in range(pp)]
    flops = sum(sum(one.flops.values()) for one in found) * run.sizes.world / pp
    return Measured(memory=tuple(map(_memory_of, found)), flops=flops if run.balanced is None else None)


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
    )
    return with_overhead(memory)
