"""A schedule as a value with its sizes, and the specification by which everything else knows a kind of schedule.

Each file of `schedules/` ends in the `ScheduleSpec` of its schedule, and `registry` lists them: the runtime, the
strategy, the planner and the command line ask the registry, and none of them branches on a name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_megatron.pipeline.schedule import Action, Order
from lightning_megatron.pipeline.simulate import Costs

if TYPE_CHECKING:
    # The mesh imports torch, which whoever looks at a schedule need not wait for.
    from lightning_megatron.mesh import Placement


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule and its sizes; `registry.schedule_faults` says what does not fit together."""

    name: str
    """Name of the schedule in the registry."""
    pp: int
    """Ranks of the pipeline."""
    chunks: int
    """Stages on each rank."""
    microbatches: int
    """Microbatches of a step."""
    group_size: int = 0
    """Microbatches that go through a chunk before the next chunk's turn, where the schedule has groups; 0: pp."""
    is_overlapped: bool = False
    """Whether a forward overlaps with a backward of another microbatch, where the schedule has such pairs."""

    @property
    def group(self) -> int:
        """Microbatches of a group, whether set or by default."""
        return self.group_size or self.pp


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A bubble in closed form."""

    text: str
    """The formula in p ranks, v chunks on each, m microbatches."""
    bubble: float
    """Share of the step in which a rank computes nothing, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """All that is known of one kind of schedule; its functions take schedules of that name."""

    name: str
    """Name that users choose it by."""
    make: Callable[[Schedule], Order]
    """The order of all ranks, from sizes without faults."""
    min_chunks: int = 1
    """Fewest stages on a rank."""
    max_chunks: int | None = None
    """Most stages on a rank; none: as many as the model has layers for."""
    min_pp: int = 1
    """Fewest ranks of the pipeline."""
    placement: Placement = "loop"
    """Which rank holds which stage: loop after loop over the ranks, or down the ranks and up (V)."""
    splits_backward: bool = False
    """Whether some backwards are split into dgrad and a later wgrad."""
    has_groups: bool = False
    """Whether microbatches go through the chunks of a rank in groups."""
    bubble: Callable[[Schedule, Costs], Formula | None] = lambda schedule, costs: None
    """The bubble in closed form where messages take no time, none where its conditions are not met."""
    make_overlapped: Callable[[Schedule], tuple[Order, frozenset[Action]]] | None = None
    """The order in which forwards overlap with the backward right after them, and those forwards."""
    steady_after: Callable[[Schedule], int] = lambda schedule: 2 * schedule.pp + 2
    """Microbatches after which further ones only repeat: what a rank saves for backward is never more than then."""
    ramps_once: bool = False
    """Whether a step takes the slowest rank's time for all microbatches, and each other rank's for one more chunk."""
