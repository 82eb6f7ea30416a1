"""A layout's blocks cover both sides once, so that any pieces of ours are read and the whole is written back."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.hf import blocks
from lightning_megatron.sharding import Box
from lightning_megatron.transformer.config import TransformerConfig

sizes = st.integers(1, 5)


def config_of(groups: int, queries: int, head_dim: int, hidden: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=groups * queries,
        num_query_groups=groups,
        head_dim=head_dim,
        ffn_hidden_size=hidden + 1,
        position="rotary" if head_dim > 3 else "none",
        rotary_fraction=0.5,
    )


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[blocks.TensorBlock, ...], tuple[int, ...]]:
    """The blocks of a tensor and its shape, of any size."""
    groups, queries, head_dim, hidden = (draw(sizes) for _ in range(4))
    config = config_of(groups, queries, head_dim, hidden)
    rest = draw(st.sampled_from([(), (hidden,)]))
    fused = (groups * (queries + 2) * head_dim, *rest)
    layout, shape = draw(
        st.sampled_from(
            [
                (blocks.identity, (groups, *rest)),
                (blocks.transposed, (groups, hidden)),
                (blocks.each, (2, hidden + 1, *rest)),
                (blocks.each, (groups, hidden, head_dim)),
                (blocks.gate_and_up_of_each, (groups, 2, head_dim, hidden)),
                (blocks.gate_and_up_in_rows, (groups, 2, head_dim, hidden)),
                (blocks.interleaved_gate_and_up, (groups, 2, head_dim, *rest)),
                (blocks.transposed_of_each, (groups, head_dim, hidden)),
                (blocks.query_key_value, fused),
                (blocks.interleaved_query_key_value, fused),
                (blocks.joined_query_key_value, fused),
                (blocks.joined_query_key_value_columns, (fused[0], hidden)),
                (blocks.joined, (2, hidden + 1, *rest)),
            ]
        )
    )
    return layout(config, shape), shape


@st.composite
def cut(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that tile a tensor: cut along one dim at any places."""
    dim = draw(st.integers(0, len(shape) - 1))
    places = sorted(draw(st.sets(st.integers(1, shape[dim]), max_size=3)) | {0, shape[dim]})
    return [
        Box(
            tuple(start if i == dim else 0 for i in range(len(shape))),
            tuple(end - start if i == dim else n for i, n in enumerate(shape)),
        )
        for start, end in pairwise(places)
    ]


@given(st.data())
def test_what_is_written_and_read_in_pieces_is_what_it_was(data: st.DataObject) -> None:
    found, shape = data.draw(layouts())
    ours = torch.arange(math.prod(shape)).view(shape)
    theirs = [torch.full(shape, -1) for shape in blocks.shapes_of_sources(found)]
    for source, tensor in enumerate(theirs):
        blocks.fill_theirs(tensor, source, found, ours)
    # Every element of ours is in theirs, once.
    assert torch.cat([tensor.flatten() for tensor in theirs]).sort().values.equal(ours.flatten())
    for box in data.draw(cut(shape)):
        out = torch.full(box.sizes, -1)
        requested = []

        def read(source: int, part: Box, requested: list[int] = requested) -> torch.Tensor:
            requested.append(math.prod(part.sizes))
            return blocks.part(theirs[source], part)

        blocks.fill_ours(out, box, found, read)
        assert out.equal(blocks.part(ours, box))
        # And no element is read that is not needed.
        assert sum(requested) == out.numel()


CONFIG: dict[str, Any] = {"groups": 2, "queries": 2, "head_dim": 1, "hidden": 3}


def test_groups_in_a_row_become_queries_keys_and_values() -> None:
    found = blocks.query_key_value(config_of(**CONFIG), (8,))
    theirs = [torch.zeros(shape, dtype=torch.long) for shape in blocks.shapes_of_sources(found)]
    for source, tensor in enumerate(theirs):
        blocks.fill_theirs(tensor, source, found, torch.arange(8))
    assert [tensor.tolist() for tensor in theirs] == [[0, 1, 4, 5], [2, 6], [3, 7]]


def test_joined_queries_keys_and_values_are_columns() -> None:
    found = blocks.joined_query_key_value_columns(config_of(**CONFIG), (8, 3))
    theirs = torch.zeros(blocks.shapes_of_sources(found)[0], dtype=torch.long)
    blocks.fill_theirs(theirs, 0, found, torch.arange(24).view(8, 3))
    assert theirs.shape == (3, 8)
    assert theirs[0].tolist() == [3 * row for row in (0, 1, 4, 5, 2, 6, 3, 7)]


def test_a_layout_with_a_hole_is_noticed() -> None:
    found = blocks.query_key_value(config_of(**CONFIG), (8,))[:-1]
    with pytest.raises(AssertionError, match="cover our tensor once"):
        blocks.fill_ours(torch.zeros(8), Box((0,), (8,)), found, lambda source, box: torch.zeros(box.sizes))
