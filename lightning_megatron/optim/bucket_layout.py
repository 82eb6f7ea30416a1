"""Where each parameter's gradient stands in flat buckets that are summed, and cut over replicas, in one message each.

Pure arithmetic over numbers of elements. Buckets follow the order given, which is that in which a backward makes
gradients, so that the first can travel while the rest is still being made. A bucket is cut into equal shards, one for
each replica: either without regard to parameters, so that shards are even and a parameter may lie in two of them, or
so that every parameter lies whole in one, for optimizers that look at whole matrices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Elements. Parameters and shards begin at multiples of it: 64 bytes in float32, which vector instructions like.
ALIGNMENT = 16


@dataclass(frozen=True)
class BucketLayout:
    """Which parameters a bucket has, by their place in the list, and where each begins in it."""

    members: tuple[int, ...]
    starts: tuple[int, ...]
    num_elements: int
    """In all, gaps included; a multiple of the number of shards."""


@dataclass(frozen=True)
class Range:
    """Elements from `start` to before `end` of something flat."""

    start: int
    end: int

    @property
    def is_empty(self) -> bool:
        return self.end <= self.start


def bucket_layouts(
    sizes: Sequence[int], *, num_shards: int, bucket_size: int, no_split: bool = False
) -> list[BucketLayout]:
    """The buckets of parameters with `sizes` elements each, about `bucket_size` elements in one."""
    layouts, members, filled = [], list[int](), 0
    for index, size in enumerate(sizes):
        if members and filled + size > bucket_size:
            layouts.append(_layout(members, sizes, num_shards, no_split))
            members, filled = [], 0
        members.append(index)
        filled += size
    if members:
        layouts.append(_layout(members, sizes, num_shards, no_split))
    return layouts


def own_range(start: int, size: int, num_elements: int, num_shards: int, rank: int) -> Range:
    """Of a parameter of `size` elements at `start` of a bucket, those that lie in the shard of `rank`."""
    length = num_elements // num_shards
    first, last = max(start, rank * length), min(start + size, (rank + 1) * length)
    return Range(first - start, max(first, last) - start)


def _layout(members: list[int], sizes: Sequence[int], num_shards: int, no_split: bool) -> BucketLayout:
    if no_split:
        return _whole_layout(members, sizes, num_shards)
    starts, end = [], 0
    for index in members:
        starts.append(end)
        end = _aligned(end + sizes[index])
    return BucketLayout(tuple(members), tuple(starts), _aligned(-(-end // num_shards)) * num_shards)


def _whole_layout(members: list[int], sizes: Sequence[int], num_shards: int) -> BucketLayout:
    """Each parameter to the shard that has least so far, the largest first."""
    ends = [0] * num_shards
    places: dict[int, tuple[int, int]] = {}
    for index in sorted(members, key=lambda index: (-sizes[index], index)):
        shard = ends.index(min(ends))
        places[index] = (shard, ends[shard])
        ends[shard] = _aligned(ends[shard] + sizes[index])
    length = max(ends)
    starts = tuple(places[index][0] * length + places[index][1] for index in members)
    return BucketLayout(tuple(members), starts, length * num_shards)


def _aligned(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT
