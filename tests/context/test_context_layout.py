"""Every token lies on one rank, the blocks of attention are what each token may see, and work and padding are even."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatron.context.context_layout import PADDING, ContextLayout, MaskSpec, cut, require_even

lengths_of_segments = st.lists(st.one_of(st.integers(1, 4), st.integers(1, 300)), min_size=1, max_size=6)
outers, inners = st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 3])


def positions_of(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Segment and position of every place."""
    segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return segments, torch.cat([torch.arange(length) for length in lengths])


@given(lengths_of_segments, outers, inners, st.booleans())
def test_every_token_lies_on_one_rank_in_order(lengths: list[int], ring: int, ulysses: int, is_zigzag: bool) -> None:
    layout = cut(lengths, ring_size=ring, ulysses_size=ulysses, is_zigzag=is_zigzag)
    segments, positions = positions_of(lengths)
    places = torch.cat([layout.places(rank) for rank in range(layout.size)])
    assert sorted(places[places != PADDING].tolist()) == list(range(sum(lengths)))
    assert torch.equal(places[layout.rows], torch.arange(sum(lengths)))
    for rank in range(layout.size):
        own, of_segment = layout.places(rank), layout.positions(rank)
        real = own[own != PADDING]
        assert torch.equal(of_segment[own != PADDING], positions[real])
        assert torch.equal(own == PADDING, of_segment == PADDING)
        assert (real.diff() > 0).all()  # the order of the stream stays
        firsts = {int(segments[own[row]]): row for row in torch.nonzero(of_segment == 0).flatten().tolist()}
        assert layout.first_rows(rank) == [firsts.get(segment, PADDING) for segment in range(len(lengths))]


@given(lengths_of_segments, outers, inners, st.booleans())
def test_groups_hold_equally_many_tokens_and_padding_is_what_does_not_divide(
    lengths: list[int], ring: int, ulysses: int, is_zigzag: bool
) -> None:
    layout = cut(lengths, ring_size=ring, ulysses_size=ulysses, is_zigzag=is_zigzag)
    counts = (layout.group_places != PADDING).sum(dim=1)
    assert counts.max() - counts.min() <= 1
    assert layout.num_rows == -(-int(counts.max()) // ulysses)


@given(lengths_of_segments, outers, st.booleans(), st.booleans(), st.sampled_from([0, 1, 3, 40, 150]))
def test_blocks_are_what_each_token_may_see_each_pair_once(
    lengths: list[int], ring: int, is_zigzag: bool, is_causal: bool, window: int
) -> None:
    layout = cut(lengths, ring_size=ring, is_zigzag=is_zigzag)
    mask_spec = MaskSpec(is_causal=is_causal, window=window if is_causal else 0)
    segments, positions = positions_of(lengths)
    visible = (segments[:, None] == segments) & mask_spec.is_visible(positions, positions)
    assert torch.equal(seen_by_blocks(layout, mask_spec), visible.int())


def seen_by_blocks(layout: ContextLayout, mask_spec: MaskSpec) -> Tensor:
    """How often each pair of places stands in a block in which the query sees the key."""
    seen = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.int32)
    for group in range(layout.ring_size):
        for source in range(layout.ring_size):
            for block in layout.blocks(group, source, mask_spec):
                queries = slice(block.query_row, block.query_row + block.num_queries)
                keys = slice(block.key_row, block.key_row + block.num_keys)
                pairs = torch.ones(block.num_queries, block.num_keys, dtype=torch.int32)
                if block.kind == "causal":
                    pairs = pairs.tril()
                elif block.kind == "masked":
                    own = layout.group_positions[group, queries], layout.group_positions[source, keys]
                    pairs = mask_spec.is_visible(*own).int()
                seen[layout.group_places[group, queries][:, None], layout.group_places[source, keys]] += pairs
    return seen


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_zigzag_gives_every_group_the_same_causal_work_in_few_whole_blocks(ring: int) -> None:
    layout = cut([64 * ring], ring_size=ring)
    mask_spec = MaskSpec(is_causal=True)
    work = []
    for group in range(ring):
        blocks = [block for source in range(ring) for block in layout.blocks(group, source, mask_spec)]
        assert len(blocks) == ring and all(block.kind != "masked" for block in blocks)
        work.append(sum(b.num_queries * b.num_keys / (2 if b.kind == "causal" else 1) for b in blocks))
    assert len(set(work)) == 1
    contiguous = cut([64 * ring], ring_size=ring, is_zigzag=False)
    pairs = [sum(b.num_keys for s in range(ring) for b in contiguous.blocks(g, s, mask_spec)) for g in range(ring)]
    assert max(pairs) >= ring * min(pairs)


def test_a_window_costs_by_its_width_and_not_by_the_sequence() -> None:
    layout = cut([8192], ring_size=2)
    blocks = [b for g in range(2) for s in range(2) for b in layout.blocks(g, s, MaskSpec(is_causal=True, window=256))]
    assert sum(block.num_queries * block.num_keys for block in blocks) <= 8192 * 3 * 256


def test_a_call_of_no_token_has_a_row_of_padding() -> None:
    layout = cut([], ring_size=2, ulysses_size=2)
    assert layout.num_rows == 1 and (layout.group_places == PADDING).all()
    assert layout.blocks(0, 1, MaskSpec(is_causal=True)) == ()


def test_segments_that_would_need_padding_are_named() -> None:
    require_even([8, 16], ring_size=2, ulysses_size=2)
    with pytest.raises(ValueError, match=r"1 of 2 sequences, the first of 12 tokens.*of 8.*8 or 16"):
        require_even([8, 12], ring_size=2, ulysses_size=2)
    require_even([7], ring_size=1, ulysses_size=1)
    with pytest.raises(ValueError, match=r"the first of 1 tokens.*give 2,"):
        require_even([1], ring_size=1, ulysses_size=2)
