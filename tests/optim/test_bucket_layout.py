"""Flat buckets: every element has one index, every index one owner."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.optim.bucket_layout import ALIGNMENT, BucketLayout, bucket_layouts, own_range

SIZES = st.lists(st.integers(0, 300), min_size=1, max_size=12)


def occupied(layout: BucketLayout, sizes: list[int]) -> list[tuple[int, int]]:
    return [(start, start + sizes[i]) for i, start in zip(layout.members, layout.starts, strict=True)]


@given(SIZES, st.integers(1, 5), st.integers(1, 700), st.booleans())
def test_every_parameter_has_a_range_of_its_own(sizes: list[int], shards: int, bucket: int, whole: bool) -> None:
    layouts = bucket_layouts(sizes, num_shards=shards, bucket_size=bucket, no_split=whole)
    assert [i for layout in layouts for i in layout.members] == list(range(len(sizes)))
    for layout in layouts:
        assert layout.num_elements % shards == 0
        assert all(start % ALIGNMENT == 0 for start in layout.starts)
        taken = sorted(place for place in occupied(layout, sizes) if place[1] > place[0])
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
        assert all(end <= layout.num_elements for _, end in taken)


@given(SIZES, st.integers(1, 5), st.integers(1, 700), st.booleans())
def test_every_element_has_one_owner(sizes: list[int], shards: int, bucket: int, whole: bool) -> None:
    for layout in bucket_layouts(sizes, num_shards=shards, bucket_size=bucket, no_split=whole):
        for index, start in zip(layout.members, layout.starts, strict=True):
            size = sizes[index]
            ranges = [own_range(start, size, layout.num_elements, shards, rank) for rank in range(shards)]
            held = [i for r in ranges for i in range(r.start, r.end)]
            assert held == list(range(size))
            if whole:
                assert sum(not r.is_empty for r in ranges) == (size > 0)


@given(SIZES, st.integers(1, 700))
def test_a_bucket_is_full_before_the_next_begins(sizes: list[int], bucket: int) -> None:
    layouts = bucket_layouts(sizes, num_shards=1, bucket_size=bucket)
    for one, following in itertools.pairwise(layouts):
        assert sum(sizes[i] for i in one.members) + sizes[following.members[0]] > bucket
        assert len(one.members) == 1 or sum(sizes[i] for i in one.members) <= bucket


def test_unsplit_parameters_are_spread_evenly() -> None:
    [layout] = bucket_layouts([512, 256, 256, 128, 128], num_shards=2, bucket_size=10_000, no_split=True)
    # 512 + 128 against 256 + 256 + 128.
    assert layout.num_elements == 2 * 640
    assert layout.starts == (0, 640, 896, 512, 1152)


def test_shards_without_regard_to_parameters_are_even() -> None:
    [layout] = bucket_layouts([1600, 16], num_shards=4, bucket_size=10_000)
    assert layout.num_elements == 4 * 416
    assert own_range(0, 1600, 1664, 4, 3).end - own_range(0, 1600, 1664, 4, 3).start == 1600 - 3 * 416
