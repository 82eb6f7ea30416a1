"""The process groups of a run: each is made by its members alone, and shares one time-out with the others."""

from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from lightning_megatron.mesh import Axis


class Groups:
    """Maker of groups of global ranks, in whose collectives a rank waits no longer than `timeout`."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout

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

    def over_host(self, axis: Axis) -> Axis:
        """The ranks of an axis, over a group of its own that talks over host memory."""
        return replace(axis, group=self.on_host(axis.ranks)) if axis.size > 1 else axis
