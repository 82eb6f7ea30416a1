"""Removal of empty microbatches: a group without documents joins its neighbours, and slots without any get some."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_megatron.context.balance.slots import RankGroup, SlotGroups


def without_empty_groups(
    slots: Sequence[Sequence[RankGroup]], sizes: Sequence[int], lengths: Sequence[int]
) -> tuple[SlotGroups, ...]:
    """Slots, groups by first rank, with an empty group only where documents are fewer than slots times widest groups.

    `sizes` are the group sizes, descending.
    """
    if all(group.documents for slot in slots for group in slot):
        return tuple(map(in_order, slots))
    widest = sizes[0]
    ranks = sum(group.size for group in slots[0])
    # One part per slot and widest group: its groups may be joined into one.
    parts = [
        [group for group in slot if group.first // widest == block]
        for slot in slots
        for block in range(ranks // widest)
    ]
    _move_documents(parts, lengths)
    parts = [_joined(part, sizes) for part in parts]
    blocks = ranks // widest
    return tuple(
        in_order([group for part in parts[first : first + blocks] for group in part])
        for first in range(0, len(parts), blocks)
    )


def _move_documents(parts: list[list[RankGroup]], lengths: Sequence[int]) -> None:
    """Moves a document to every part without any: the shortest of the part with most."""
    counts = [sum(len(group.documents) for group in part) for part in parts]
    for empty, part in enumerate(parts):
        donor = max(range(len(parts)), key=lambda i: (counts[i], -i))
        if counts[empty] or counts[donor] < 2:
            continue
        shortest = min((lengths[d], d) for group in parts[donor] for d in group.documents)[1]
        parts[donor] = [
            RankGroup(group.first, group.size, tuple(d for d in group.documents if d != shortest))
            for group in parts[donor]
        ]
        counts[donor] -= 1
        first, size = min(group.first for group in part), sum(group.size for group in part)
        parts[empty] = [RankGroup(first, size, (shortest,))]
        counts[empty] = 1


def _joined(part: list[RankGroup], sizes: Sequence[int]) -> list[RankGroup]:
    """The part with each empty group joined with its neighbours, until the group they make has a document.

    Groups that keep the memory cap keep it together on all of their ranks.
    """
    for size, wider in pairwise(reversed(sizes)):
        blocks = {group.first // wider for group in part if group.size == size and not group.documents}
        if not blocks:
            continue
        joined = [group for group in part if group.size > size or group.first // wider not in blocks]
        for block in sorted(blocks):
            inside = [group for group in part if group.size <= size and group.first // wider == block]
            documents = sorted(document for group in inside for document in group.documents)
            joined.append(RankGroup(block * wider, wider, tuple(documents)))
        part = joined
    return part


def in_order(slot: Sequence[RankGroup]) -> SlotGroups:
    """Groups of a slot sorted by their first rank."""
    return tuple(sorted(slot, key=lambda group: group.first))
