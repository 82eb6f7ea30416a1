"""The plan of a step: which group of ranks runs which documents in each microbatch, and the time it takes.

The balancer makes it, and every rank reads its own line of it.

The R = dp x cp ranks of one pipeline stage are a line 0..R-1. A step is M slots, one microbatch of every rank each. In
a slot the line is cut into groups: contiguous ranks, the first a multiple of the size. A group runs its documents as
one packed call, cut over its ranks; a group with no documents is an empty microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_megatron.context.balance.cost import CostModel


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A group of ranks that run one packed microbatch together."""

    first: int
    """First rank of the group."""
    size: int
    documents: tuple[int, ...]
    """Indices into the lengths that were planned, ascending; none where there was no document left."""

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.size)


SlotGroups = tuple[RankGroup, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Groups and documents of every microbatch of a step; equal on all ranks that planned the same lengths."""

    num_ranks: int
    slots: tuple[SlotGroups, ...]
    """Groups of every microbatch by first rank; together they hold every rank once."""
    seconds: float
    """Time of the step by the cost model: see `step_seconds`."""
    lower_bound: float
    """Lower bound on `step_seconds` of any plan."""

    def groups_of(self, rank: int) -> tuple[RankGroup, ...]:
        """Groups of a rank in order, one of every slot."""
        return tuple(next(group for group in slot if rank in group.ranks) for slot in self.slots)


def step_seconds(slots: Sequence[SlotGroups], lengths: Sequence[int], cost: CostModel, pp: int = 1) -> float:
    """Seconds until the slowest rank is done, with the fill and drain of a pipeline.

    A group starts when the last of its ranks has ended its microbatch before; ranks that share no group do not wait
    for each other. A pipeline of pp ranks adds the longest microbatch pp - 1 times, as in a flow shop of equal stages:
    that is an estimate of a real schedule. With several stages on a rank the pipeline fills faster, but one long
    microbatch still holds up every rank after it, so nothing is taken off for them.
    """
    clocks = [0.0] * sum(group.size for group in slots[0])
    longest = 0.0
    for slot in slots:
        for group in slot:
            seconds = group_seconds(group, lengths, cost)
            longest = max(longest, seconds)
            end = max(clocks[group.first : group.first + group.size]) + seconds
            clocks[group.first : group.first + group.size] = [end] * group.size
    return max(clocks) + (pp - 1) * longest


def shortest_at_ends(slots: Sequence[SlotGroups], lengths: Sequence[int], cost: CostModel) -> tuple[SlotGroups, ...]:
    """Slots in the order that suits a pipeline: the shortest at both ends, the longest in the middle.

    Ranks stand idle while the first microbatches fill the pipeline and the last ones leave it. In between, neighbours
    of about one length let no stage wait for another.
    """
    longest = [max(group_seconds(group, lengths, cost) for group in slot) for slot in slots]
    order = sorted(range(len(slots)), key=longest.__getitem__)
    return tuple(slots[index] for index in [*order[0::2], *reversed(order[1::2])])


def group_seconds(group: RankGroup, lengths: Sequence[int], cost: CostModel) -> float:
    """Seconds of one group's microbatch."""
    return pack_seconds(group.documents, group.size, lengths, cost)


def pack_seconds(documents: Sequence[int], size: int, lengths: Sequence[int], cost: CostModel) -> float:
    """Seconds of documents as one pack on `size` ranks."""
    own = [lengths[document] for document in documents]
    return cost.seconds(sum(own), sum(length * length for length in own), size)
