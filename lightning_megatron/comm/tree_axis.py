"""An axis of any number of ranks whose collectives go by a tree, in which a rank talks to few others.

A process group over host memory connects each of its ranks with each other, and all of them read what each has written
into a store. A tree needs neither: rank r of the axis is the parent of ranks `n r + 1` to `n r + n`, and a parent with
its children is a family, with a process group of its own.

    0 ── 1 2 3 4 5 6 7 8            to the first rank: each parent joins what its children have, then its own parent ...
         │                          from it: each child hands on what its parent has said
         9 10 11 12 13 14 15 16

Note: two turns. All ranks make equally many groups (`docs/decisions/2_equally_many_groups.md`). A rank is a child in
one family and a parent in the next: those whose parent stands at an even level are made first, the others second.
"""

from dataclasses import dataclass, replace

from lightning_megatron.mesh import Axis, NewGroup

FAN_OUT = 8
"""Most children of a rank."""


@dataclass(frozen=True, kw_only=True)
class TreeAxis(Axis):
    """An axis without a process group of its own; the functions of `comm.collectives` that name it take it."""

    above: Axis
    """The family in which this rank is a child; of itself alone on the first rank."""
    below: Axis
    """The family in which this rank is the parent; of itself alone where it has no children."""
    fan_out: int

    def member_towards(self, rank: int) -> int:
        """The rank in the family below by which a message to `rank`, on the axis, goes; 0 for this rank itself."""
        way = self.way_to_first(rank)
        at = way.index(self.rank)
        return way[at - 1] - _children(self.rank, self.fan_out).start + 1 if at else 0

    def way_to_first(self, rank: int) -> list[int]:
        """The ranks by which a message of `rank` goes to the first, both of them too."""
        way = [rank]
        while way[-1] > 0:
            way.append(_parent(way[-1], self.fan_out))
        return way


def tree_over(axis: Axis, new_group: NewGroup, fan_out: int = FAN_OUT) -> Axis:
    """The ranks of the axis, which talk by a tree; a single family is an ordinary axis. Collective over the world.

    `new_group` makes groups over host memory. Every rank makes equally many of them.
    """
    assert axis.ranks == tuple(sorted(axis.ranks)), f"axis {axis.name} does not ascend: {axis.ranks}"
    if axis.size == 1:
        return axis
    if axis.size <= fan_out + 1:
        return replace(axis, group=new_group(axis.ranks))
    level = _level(axis.rank, fan_out)
    families: dict[bool, Axis] = {}
    for turn in (0, 1):
        is_parent = level % 2 == turn
        head = axis.rank if is_parent else _parent(axis.rank, fan_out)
        # Above the first rank there is none, whose only child is that rank.
        members = [rank for rank in (head, *_children(head, fan_out)) if 0 <= rank < axis.size]
        ranks = tuple(axis.ranks[rank] for rank in members)
        families[is_parent] = Axis("family", len(ranks), members.index(axis.rank), ranks, new_group(ranks))
    return TreeAxis(
        axis.name,
        axis.size,
        axis.rank,
        axis.ranks,
        above=families[False],
        below=families[True],
        fan_out=fan_out,
    )


def _parent(rank: int, fan_out: int) -> int:
    return (rank - 1) // fan_out


def _children(rank: int, fan_out: int) -> range:
    return range(fan_out * rank + 1, fan_out * (rank + 1) + 1)


def _level(rank: int, fan_out: int) -> int:
    return 1 + _level(_parent(rank, fan_out), fan_out) if rank > 0 else 0
