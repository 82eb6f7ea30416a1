"""The layout of flat gradient buckets: where each parameter begins, and which shard is whose. Arithmetic alone.

Buckets follow the order given, in which backward makes gradients, so that the first can be reduced while the rest is
still being computed. A bucket is cut into equal shards, one for each data-parallel rank: either without regard to
parameters, so that shards are even and a parameter may lie in two of them, or with `no_split` so that every parameter
lies in one, for optimizers that read full matrices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Parameters and shards begin at multiples of so many elements: 64 bytes in float32, for vector instructions.
ALIGNMENT = 16


@dataclass(frozen=True)
class BucketLayout:
    """The parameters of a bucket, by their index in the list, and the element at which each begins."""

    members: tuple[int, ...]
    starts: tuple[int, ...]
    num_elements: int
    """Elements of the bucket, gaps included; a multiple of the number of shards."""


@dataclass(frozen=True)
class Range:
    """Elements `start` to before `end` of a flattened tensor."""

    start: int
    end: int

    @property
    def is_empty(self) -> bool:
        return self.end <= self.start


def bucket_layouts(
    sizes: Sequence[int], *, num_shards: int, bucket_size: int, no_split: bool = False
) -> list[BucketLayout]:
    """Layouts of buckets of about `bucket_size` elements for parameters of `sizes` elements."""
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
    """The elements of a parameter in the shard of `rank`, where it begins at `start` of a bucket and has `size`."""
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
    """A layout in which each parameter, the largest first, goes to the shard that has least so far."""
    ends = [0] * num_shards
    shard_and_start: dict[int, tuple[int, int]] = {}
    for index in sorted(members, key=lambda index: (-sizes[index], index)):
        shard = ends.index(min(ends))
        shard_and_start[index] = (shard, ends[shard])
        ends[shard] = _aligned(ends[shard] + sizes[index])
    length = max(ends)
    starts = tuple(shard_and_start[index][0] * length + shard_and_start[index][1] for index in members)
    return BucketLayout(tuple(members), starts, length * num_shards)


def _aligned(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT
