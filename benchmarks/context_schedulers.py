"""Schedulers that dynamic context parallelism is compared with on paper, and the clock that times all of them.

`static_slots`: one cp size for all, documents packed in their order. `rounds_seconds`: documents on the fewest ranks
that hold them, in rounds with a barrier between. `pipeline_seconds`: a pipeline of any schedule, played microbatch by
microbatch with the ranks of a group waiting for each other on every stage.
"""

from collections import defaultdict
from collections.abc import Sequence

from lightning_megatron.context.balance import CostModel, RankGroup
from lightning_megatron.context.balance.slots import SlotGroups, group_seconds
from lightning_megatron.pipeline.schedule import Kind, Order

# Share of the forward in forward and backward together: 1 of 3 parts, and 1 more with full recomputation.
FORWARD_SHARE = {False: 1 / 3, True: 1 / 4}
# A round ends when its ranks' work is this even.
EVEN = 0.05


def static_slots(lengths: Sequence[int], ranks: int, cp: int, max_tokens_per_rank: int) -> tuple[SlotGroups, ...]:
    """Documents in their order in packs of at most cp times the cap, dealt to the dp ranks in turn."""
    packs: list[list[int]] = [[]]
    tokens = 0
    for document, length in enumerate(lengths):
        if tokens + length > cp * max_tokens_per_rank:
            packs.append([])
            tokens = 0
        packs[-1].append(document)
        tokens += length
    dp = ranks // cp
    packs += [[] for _ in range(-len(packs) % dp)]
    return tuple(
        tuple(RankGroup(dp_rank * cp, cp, tuple(packs[first + dp_rank])) for dp_rank in range(dp))
        for first in range(0, len(packs), dp)
    )


def rounds_seconds(lengths: Sequence[int], ranks: int, max_tokens_per_rank: int, cost: CostModel) -> float:
    """Seconds of rounds: each document on the fewest ranks that hold it, longest first, on free ranks or else on the
    group of its size with the least squares a rank; a round ends when ranks are even or nothing more fits.

    Documents of a group run one after another. Written from a description of such a scheduler, for comparison.
    """
    left = sorted(range(len(lengths)), key=lambda document: -lengths[document])
    total = 0.0
    while left:
        squares, seconds = [0.0] * ranks, [0.0] * ranks
        groups: dict[int, list[int]] = defaultdict(list)
        postponed: list[int] = []
        for index, document in enumerate(left):
            length = lengths[document]
            size = 1
            while length > size * max_tokens_per_rank:
                size *= 2
            free = next((f for f in range(0, ranks, size) if not any(squares[f : f + size])), None)
            if free is None and not groups[size]:
                postponed.append(document)
                continue
            if free is not None:
                groups[size].append(free)
            first = free if free is not None else min(groups[size], key=lambda f: squares[f])
            for rank in range(first, first + size):
                squares[rank] += length**2 / size
                seconds[rank] += cost.seconds(length, length**2, size)
            if min(squares) > 0 and max(squares) - min(squares) <= EVEN * max(squares):
                postponed += left[index + 1 :]
                break
        left = postponed
        total += max(seconds)
    return total


def pipeline_seconds(
    order: Order,
    slots: Sequence[SlotGroups],
    lengths: Sequence[int],
    cost: CostModel,
    *,
    chunks: int,
    is_recomputed: bool,
) -> float:
    """Seconds of a step through a pipeline; `cost` is of all chunks of one pipeline rank."""
    return _PipelineClock(order, slots, lengths, cost, chunks, FORWARD_SHARE[is_recomputed]).run()


class _PipelineClock:
    """Clock of a pipeline: every pipeline rank has a column of dp x cp ranks, each working through the same order.

    A cell is one group's forward or backward of a microbatch on a stage: (is forward, stage, microbatch, first rank).
    It starts when all its ranks have come to it and its input is there.
    """

    def __init__(
        self,
        order: Order,
        slots: Sequence[SlotGroups],
        lengths: Sequence[int],
        cost: CostModel,
        chunks: int,
        forward_share: float,
    ) -> None:
        self.order = order
        self.num_stages = len(order) * chunks
        self.rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
        self.group_of = [[group for group in slot for _ in group.ranks] for slot in slots]
        self.seconds = [{group.first: group_seconds(group, lengths, cost) / chunks for group in slot} for slot in slots]
        self.forward_share = forward_share
        self.num_ranks = len(self.group_of[0])
        self.clocks = [[0.0] * self.num_ranks for _ in order]
        self.positions = [[0] * self.num_ranks for _ in order]
        self.ends: dict[tuple[bool, int, int, int], float] = {}
        self.arrived: dict[tuple[bool, int, int, int], int] = defaultdict(int)

    def run(self) -> float:
        ready = [
            cell
            for stage in range(len(self.order))
            for rank in range(self.num_ranks)
            for cell in self._arrive(stage, rank)
        ]
        while ready:
            ready += self._play(ready.pop())
        assert all(
            p == len(actions) for actions, column in zip(self.order, self.positions, strict=True) for p in column
        )
        return max(max(column) for column in self.clocks)

    def _arrive(self, pipeline_rank: int, rank: int) -> list[tuple[bool, int, int, int]]:
        """Moves a rank to its next action; returns the cell that can start now, if one can."""
        position = self.positions[pipeline_rank][rank]
        if position == len(self.order[pipeline_rank]):
            return []
        action = self.order[pipeline_rank][position]
        cell = (
            action.kind is Kind.FORWARD,
            action.stage,
            action.microbatch,
            self.group_of[action.microbatch][rank].first,
        )
        self.arrived[cell] += 1
        return [cell] if self._can_start(cell) else []

    def _can_start(self, cell: tuple[bool, int, int, int]) -> bool:
        source = self._input_of(cell)
        return self.arrived[cell] == self.group_of[cell[2]][cell[3]].size and (source is None or source in self.ends)

    def _input_of(self, cell: tuple[bool, int, int, int]) -> tuple[bool, int, int, int] | None:
        is_forward, stage, microbatch, first = cell
        if is_forward:
            return (True, stage - 1, microbatch, first) if stage else None
        is_last = stage + 1 == self.num_stages
        return (True, stage, microbatch, first) if is_last else (False, stage + 1, microbatch, first)

    def _play(self, cell: tuple[bool, int, int, int]) -> list[tuple[bool, int, int, int]]:
        """Runs a cell; returns the cells that can start after it."""
        is_forward, stage, microbatch, first = cell
        pipeline_rank = self.rank_of[stage]
        ranks = self.group_of[microbatch][first].ranks
        source = self._input_of(cell)
        clocks = self.clocks[pipeline_rank]
        start = max([clocks[rank] for rank in ranks] + ([self.ends[source]] if source else []))
        share = self.forward_share if is_forward else 1 - self.forward_share
        self.ends[cell] = start + share * self.seconds[microbatch][first]
        reader = (True, stage + 1, microbatch, first) if is_forward else (False, stage - 1, microbatch, first)
        found = [reader] if 0 <= reader[1] < self.num_stages and self._can_start(reader) else []
        for rank in ranks:
            clocks[rank] = self.ends[cell]
            self.positions[pipeline_rank][rank] += 1
        for rank in ranks:
            found += self._arrive(pipeline_rank, rank)
        return found
