"""The plans that a run takes, each made once: every step asks for the same one."""

from functools import lru_cache

from lightning_megatron.mesh import Sizes
from lightning_megatron.pipeline.lower import ScheduledProgram, add_messages, lower, rank_of_stage
from lightning_megatron.pipeline.registry import order_of, overlapped_forwards
from lightning_megatron.pipeline.schedule import Order, backward_chunks, forward_chunks
from lightning_megatron.pipeline.schedule_spec import Schedule


@lru_cache(maxsize=16)
def training_plan(schedule: Schedule) -> ScheduledProgram:
    """The full plan of a training schedule. Raises ValueError where the schedule cannot be had."""
    return lower(order_of(schedule), overlapped_forwards(schedule))


@lru_cache(maxsize=16)
def forward_plan(sizes: Sizes, microbatches: int) -> ScheduledProgram:
    """All microbatches through all stages, as in evaluation."""
    return _program(forward_chunks(ranks=_ranks(sizes), microbatches=microbatches))


@lru_cache(maxsize=16)
def backward_plan(sizes: Sizes, microbatches: int) -> ScheduledProgram:
    """The backwards that follow `forward_plan`."""
    return _program(backward_chunks(ranks=_ranks(sizes), microbatches=microbatches))


def _ranks(sizes: Sizes) -> tuple[int, ...]:
    return tuple(sizes.pp_rank_of(stage) for stage in range(sizes.num_stages))


def _program(order: Order) -> ScheduledProgram:
    return ScheduledProgram(add_messages(order), rank_of_stage(order))
