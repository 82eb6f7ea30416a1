"""The process groups of a run: each is made by its members alone, and shares one time-out with the others."""

from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from lightning_megatron.comm.tree_axis import tree_over
from lightning_megatron.mesh import Axis

# A week: far more than any rank is to wait for another.
_MOST_SECONDS = 7 * 24 * 3600


def timeout_faults(timeout_seconds: float) -> list[str]:
    """Errors of a time-out, one sentence each."""
    if 1 <= timeout_seconds <= _MOST_SECONDS:
        return []
    return [
        f"timeout_seconds ({timeout_seconds}) must be from 1 to {_MOST_SECONDS} (a week): so long does a rank wait "
        "for another before it gives up; 1800 is the default"
    ]


class Groups:
    """Maker of groups of global ranks, in whose collectives a rank waits no longer than `timeout_seconds`."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds

    @property
    def timeout(self) -> timedelta:
        """The time-out as torch takes it."""
        return timedelta(seconds=self.timeout_seconds)

    def on_device(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """A group that communicates between devices."""
        group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=self.timeout, use_local_synchronization=True)
        return group

    def on_host(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """A group that communicates over host memory."""
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=self.timeout, backend="gloo", use_local_synchronization=True
        )
        return group

    def tree_over_host(self, axis: Axis) -> Axis:
        """The ranks of an axis, which talk over host memory by a tree; where they are few, over a group of its own."""
        return tree_over(axis, self.on_host)

    def over_host(self, axis: Axis) -> Axis:
        """The ranks of an axis, over a group of its own that talks over host memory."""
        return replace(axis, group=self.on_host(axis.ranks)) if axis.size > 1 else axis
