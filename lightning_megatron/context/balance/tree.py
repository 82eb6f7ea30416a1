"""Documents on a tree of groups: which group runs which documents, before they are put into microbatches.

The aligned groups of a line of ranks are a tree: a group of one size is cut into those of the next smaller size. A
document sits in one node. Each rank first runs the documents of the widest group it is in, then of the next, down to
its own.

Note: groups do not grow. From one microbatch of a rank to the next the group gets no wider. So the ranks of a group
have always been in the same groups before, their clocks are equal, and no rank ever waits for another. The time of a
step is then the longest path from a root to a leaf, and balance is nothing but longest-first on clocks, level by level.
(A pipeline has other reasons for an order: see `shortest_at_ends`.)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_megatron.context.balance.cost import CostModel
from lightning_megatron.context.balance.slots import pack_seconds


@dataclass(frozen=True, slots=True)
class Tree:
    """Documents by level, widest groups first, and by group from the first rank on."""

    sizes: tuple[int, ...]
    """Number of ranks of a group of each level, descending."""
    documents: list[list[list[int]]]
    """Documents of each group, by level."""
    seconds: list[list[float]]
    """Seconds of each group's documents as one pack, without the fixed part."""
    path_seconds: list[list[float]]
    """Seconds of each group and the longest path below it."""

    @property
    def slowest_seconds(self) -> float:
        return max(self.path_seconds[0])


def grow(
    by_level: Sequence[Sequence[int]],
    seconds_alone: Sequence[Sequence[float]],
    sizes: tuple[int, ...],
    ranks: int,
    lengths: Sequence[int],
    cost: CostModel,
) -> Tree:
    """Tree in which every document, longest first, goes to the group of its size that is free first.

    `seconds_alone` is by level and document, without the fixed part.
    """
    documents: list[list[list[int]]] = []
    seconds: list[list[float]] = []
    clocks = [0.0]
    for size, own, alone in zip(sizes, by_level, seconds_alone, strict=True):
        num_blocks = ranks // size
        before = [clock for clock in clocks for _ in range(num_blocks // len(clocks))]
        placed = _place(own, before, alone)
        taken = [pack_seconds(block, size, lengths, cost) - cost.fixed_seconds for block in placed]
        documents.append(placed)
        seconds.append(taken)
        clocks = [start + spent for start, spent in zip(before, taken, strict=True)]
    return Tree(sizes, documents, seconds, path_sums(seconds))


def slowest_documents(tree: Tree) -> list[int]:
    """Documents on the longest path."""
    documents: list[int] = []
    block = max(range(len(tree.path_seconds[0])), key=tree.path_seconds[0].__getitem__)
    for level, paths in enumerate(tree.path_seconds):
        if level:
            count = len(paths) // len(tree.path_seconds[level - 1])
            block = max(range(block * count, (block + 1) * count), key=paths.__getitem__)
        documents += tree.documents[level][block]
    return documents


def longest_below(values: Sequence[Sequence[float]], level: int, block: int) -> float:
    """Largest value of the next level under one group; 0 under the last level."""
    if level + 1 == len(values):
        return 0
    count = len(values[level + 1]) // len(values[level])
    return max(values[level + 1][block * count : (block + 1) * count])


def _place(own: Sequence[int], before: Sequence[float], alone: Sequence[float]) -> list[list[int]]:
    """Documents of each group of one level, whose clocks start at `before`."""
    placed: list[list[int]] = [[] for _ in before]
    heap = [(clock, block) for block, clock in enumerate(before)]
    heapq.heapify(heap)
    for document in own:
        clock, block = heap[0]
        placed[block].append(document)
        heapq.heapreplace(heap, (clock + alone[document], block))
    return placed


def path_sums(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Value of each group plus the largest path of values below it, by level."""
    sums = [list(level) for level in values]
    for level in reversed(range(len(sums) - 1)):
        sums[level] = [value + longest_below(sums, level, block) for block, value in enumerate(sums[level])]
    return sums
