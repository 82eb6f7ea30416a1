"""The microbatches of a step, made of documents on a tree: each group packs its documents into some of M slots.

On every path from a root to a leaf the numbers of slots add up to M. A group gets a share of the slots left to it that
goes with its share of the time, so microbatches come out about equally long; never fewer than its tokens need.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_megatron.context.balance.bound import rounded_up
from lightning_megatron.context.balance.cost import CostModel
from lightning_megatron.context.balance.empty import in_order
from lightning_megatron.context.balance.slots import RankGroup, SlotGroups
from lightning_megatron.context.balance.tree import Tree, longest_below, path_sums


@dataclass(frozen=True, slots=True)
class Limits:
    """Constraints on the microbatches of a plan."""

    max_tokens_per_rank: int
    min_microbatches: int
    multiple: int


def microbatches(tree: Tree, lengths: Sequence[int], cost: CostModel, limits: Limits) -> tuple[SlotGroups, ...]:
    """Slots of the tree's plan, as few as the limits and the packing of tokens allow."""
    needs = _needs(tree, lengths, limits)
    while True:
        count = rounded_up(max(limits.min_microbatches, _most_needed(needs)), limits.multiple)
        documents = [*tree.documents[:-1], [list(leaf) for leaf in tree.documents[-1]]]
        counts = _share(tree, needs, count)
        _give_to_idle(documents[-1], counts[-1], lengths)
        slots = _packed(tree.sizes, documents, counts, needs, lengths, cost, limits)
        if slots is not None:
            return tuple(map(in_order, slots))


def fewest_slots(tree: Tree, lengths: Sequence[int], limits: Limits) -> int:
    """Number of slots that the tokens on the fullest path need if they pack without gaps."""
    return _most_needed(_needs(tree, lengths, limits))


def _most_needed(needs: Sequence[Sequence[int]]) -> int:
    """Number of slots of the path that needs most."""
    return int(max(path_sums(needs)[0]))


def _needs(tree: Tree, lengths: Sequence[int], limits: Limits) -> list[list[int]]:
    """Number of slots that the tokens of each group need, by level."""
    return [
        [-(-sum(lengths[document] for document in block) // (size * limits.max_tokens_per_rank)) for block in level]
        for size, level in zip(tree.sizes, tree.documents, strict=True)
    ]


def _share(tree: Tree, needs: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Number of slots of each group, by level; along every path they add up to `count`."""
    path_needs = path_sums(needs)
    counts: list[list[int]] = []
    left = [count] * len(tree.documents[0])
    for level, (level_documents, level_needs) in enumerate(zip(tree.documents, needs, strict=True)):
        is_last = level + 1 == len(tree.sizes)
        given = []
        for block, documents in enumerate(level_documents):
            most = left[block] - int(longest_below(path_needs, level, block))
            path = tree.path_seconds[level][block]
            share = round(left[block] * tree.seconds[level][block] / path) if path else 0
            wished = min(max(level_needs[block], share), most, len(documents))
            given.append(left[block] if is_last else wished)
        counts.append(given)
        if not is_last:
            children = len(tree.documents[level + 1]) // len(level_documents)
            left = [had - took for had, took in zip(left, given, strict=True) for _ in range(children)]
    return counts


def _give_to_idle(leaves: list[list[int]], counts: Sequence[int], lengths: Sequence[int]) -> None:
    """Moves the shortest documents from leaves with more documents than slots to leaves with fewer, which would idle.

    Where there are too few, leaves far apart come first, so that idle groups join few documents.
    """
    donors = [
        (lengths[leaf[-1]], block)
        for block, (leaf, count) in enumerate(zip(leaves, counts, strict=True))
        if len(leaf) > count
    ]
    heapq.heapify(donors)
    width = len(leaves).bit_length()
    for block in sorted(range(len(leaves)), key=lambda block: f"{block:0{width}b}"[::-1]):
        leaf, count = leaves[block], counts[block]
        while len(leaf) < count and donors:
            _, donor = heapq.heappop(donors)
            leaf.append(leaves[donor].pop())
            if len(leaves[donor]) > counts[donor]:
                heapq.heappush(donors, (lengths[leaves[donor][-1]], donor))


def _packed(
    sizes: Sequence[int],
    documents: Sequence[Sequence[Sequence[int]]],
    counts: Sequence[Sequence[int]],
    needs: list[list[int]],
    lengths: Sequence[int],
    cost: CostModel,
    limits: Limits,
) -> list[list[RankGroup]] | None:
    """Groups of every slot; or None, with `needs` raised where documents did not pack."""
    slots: list[list[RankGroup]] = [[] for _ in range(sum(level[0] for level in counts))]
    starts = [0] * len(counts[0])
    fits = True
    for level, size in enumerate(sizes):
        for block, own in enumerate(documents[level]):
            count = counts[level][block]
            packs = _pack(own, count, size * limits.max_tokens_per_rank, lengths, cost)
            if packs is None:
                needs[level][block] = count + 1
                fits = False
                continue
            for index, pack in enumerate(packs, start=starts[block]):
                slots[index].append(RankGroup(block * size, size, tuple(sorted(pack))))
        if level + 1 < len(sizes):
            children = len(counts[level + 1]) // len(counts[level])
            starts = [
                start + count for start, count in zip(starts, counts[level], strict=True) for _ in range(children)
            ]
    return slots if fits else None


def _pack(
    documents: Sequence[int], count: int, max_tokens: int, lengths: Sequence[int], cost: CostModel
) -> list[list[int]] | None:
    """`count` packs of about equal work, each within max_tokens; None where that fails.

    Documents go, longest first, to the lightest pack with room.
    """
    if count == 1 and sum(lengths[document] for document in documents) <= max_tokens:
        return [list(documents)]
    packs: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    heap = [(0.0, pack) for pack in range(count)]
    for document in documents:
        length = lengths[document]
        full = []
        while heap and tokens[heap[0][1]] + length > max_tokens:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        work, pack = heap[0]
        packs[pack].append(document)
        tokens[pack] += length
        heapq.heapreplace(heap, (work + cost.work(length, length * length), pack))
        for entry in full:
            heapq.heappush(heap, entry)
    return packs
