"""Time of collectives, by the nodes that a group's ranks lie on and the links between them.

The mesh numbers ranks so that tp neighbours share a node and pipeline stages lie farthest apart. A group of n ranks at
a stride has g of them on each of its nodes; its rings use the network ports of all g.

    all-gather, reduce-scatter      bytes (n - 1)/n / min(link, g port)        bytes: of the full tensor
    all-reduce                      twice that
    all-to-all                      the larger of bytes (g - 1)/n / link and bytes (1 - g/n) / port
                                                                               bytes: that a rank sends
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from lightning_megatron.mesh import Sizes
from lightning_megatron.planner.constants import Constants
from lightning_megatron.planner.hardware import Gpu


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks of a collective, `stride` apart in the numbering of all ranks."""

    size: int
    stride: int = 1

    def per_node(self, gpu: Gpu) -> int:
        """Number of the group's ranks on one node."""
        return max(min(self.size, gpu.gpus_per_node // self.stride), 1)

    def is_on_one_node(self, gpu: Gpu) -> bool:
        """Whether all ranks of the group share a node."""
        return self.per_node(gpu) == self.size


@lru_cache(maxsize=4096)
def groups_of(sizes: Sizes) -> dict[str, Group]:
    """Groups of ranks by the name of their axis; dp_cp are dp and cp together."""
    return {
        "tp": Group(size=sizes.tp),
        "cp": Group(size=sizes.cp, stride=sizes.tp),
        "dp_cp": Group(size=sizes.dp * sizes.cp, stride=sizes.tp),
        "pp": Group(size=sizes.pp, stride=sizes.world // sizes.pp),
        "etp": Group(size=sizes.etp),
        "ep": Group(size=sizes.ep, stride=sizes.etp),
        "edp": Group(size=sizes.edp, stride=sizes.etp * sizes.ep),
    }


def gather_seconds(num_bytes: float, group: Group, gpu: Gpu, constants: Constants) -> float:
    """Seconds of an all-gather or a reduce-scatter of a tensor of so many bytes."""
    if group.size == 1 or num_bytes == 0:
        return 0.0
    return num_bytes * (group.size - 1) / group.size / _ring(group, gpu, constants) + _start(group, gpu, constants)


def exchange_seconds(num_bytes: float, group: Group, gpu: Gpu, constants: Constants) -> float:
    """Seconds of an all-to-all in which each rank sends so many bytes, its own part included."""
    if group.size == 1 or num_bytes == 0:
        return 0.0
    here = group.per_node(gpu)
    inside = num_bytes * (here - 1) / group.size / (gpu.link_bytes_per_second * constants.link_share)
    outside = num_bytes * (group.size - here) / group.size / gpu.network_bytes_per_second
    return max(inside, outside / constants.exchange_share) + _start(group, gpu, constants)


def hop_seconds(num_bytes: float, group: Group, gpu: Gpu, constants: Constants) -> float:
    """Seconds of the slowest hop between neighbours of a ring or pipeline."""
    if group.size == 1 or num_bytes == 0:
        return 0.0
    if group.is_on_one_node(gpu):
        return num_bytes / (gpu.link_bytes_per_second * constants.link_share) + constants.link_seconds
    return num_bytes / (gpu.network_bytes_per_second * constants.network_share) + constants.network_seconds


def _ring(group: Group, gpu: Gpu, constants: Constants) -> float:
    link = gpu.link_bytes_per_second * constants.link_share
    if group.is_on_one_node(gpu):
        return link
    return min(link, group.per_node(gpu) * gpu.network_bytes_per_second * constants.network_share)


def _start(group: Group, gpu: Gpu, constants: Constants) -> float:
    """Seconds of latency over the steps of a tree."""
    here = group.per_node(gpu)
    return constants.link_seconds * math.log2(here) + constants.network_seconds * math.log2(group.size / here)
