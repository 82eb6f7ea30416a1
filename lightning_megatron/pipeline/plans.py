"""The plans that a run takes, each made once: every step asks for the same one."""

from functools import lru_cache

from lightning_megatron.mesh import Sizes
from lightning_megatron.pipeline.choice import Schedule, joint_of, order_of
from lightning_megatron.pipeline.lower import Lowered, add_messages, lower, rank_of_stage
from lightning_megatron.pipeline.schedule import Order, backward_chunks, forward_chunks


@lru_cache(maxsize=16)
def training_plan(schedule: Schedule) -> Lowered:
    """The full plan of a training schedule. Raises ValueError where the schedule cannot be had."""
    return lower(order_of(schedule), joint_of(schedule))


@lru_cache(maxsize=16)
def forward_plan(sizes: Sizes, microbatches: int) -> Lowered:
    """All microbatches through all stages, as in evaluation."""
    return _lowered(forward_chunks(ranks=_ranks(sizes), microbatches=microbatches))


@lru_cache(maxsize=16)
def backward_plan(sizes: Sizes, microbatches: int) -> Lowered:
    """The backwards that follow `forward_plan`."""
    return _lowered(backward_chunks(ranks=_ranks(sizes), microbatches=microbatches))


def _ranks(sizes: Sizes) -> tuple[int, ...]:
    return tuple(sizes.pp_rank_of(stage) for stage in range(sizes.num_stages))


def _lowered(order: Order) -> Lowered:
    return Lowered(add_messages(order), rank_of_stage(order))
