"""Tests of the plan of a save: pieces in chunks, and the proxy that torch's planner asks for them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.checkpoint.save_plan import ShardedTensorProxy, chunks
from lightning_megatron.checkpoint.state import Piece
from lightning_megatron.sharding import Box


@given(shape=st.lists(st.integers(1, 7), max_size=3), max_bytes=st.integers(1, 400))
def test_chunks_are_small_and_cover_the_piece_once(shape: list[int], max_bytes: int) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    offsets = tuple(range(5, 5 + len(shape)))
    piece = Piece(tuple(20 for _ in shape), Box(offsets, tuple(shape)), tensor)
    times = torch.zeros_like(tensor)
    for chunk in chunks(piece, max_bytes):
        assert chunk.tensor.numel() * 4 <= max(max_bytes, 4)
        place = tuple(
            slice(start - first, start - first + size)
            for start, first, size in zip(chunk.box.offsets, offsets, chunk.box.sizes, strict=True)
        )
        assert torch.equal(tensor[place], chunk.tensor)
        times[place] += 1
    assert (times == 1).all()


def test_a_small_piece_is_one_chunk() -> None:
    piece = Piece.unsharded(torch.zeros(8, 8))
    assert list(chunks(piece, 256)) == [piece]
    assert len(list(chunks(piece, 255))) == 2


def test_a_proxy_has_the_global_shape_and_refuses_to_compute() -> None:
    proxy = ShardedTensorProxy([Piece((4, 6), Box((2, 0), (2, 6)), torch.zeros(2, 6, dtype=torch.bfloat16))])
    assert (proxy.shape, proxy.dtype) == ((4, 6), torch.bfloat16)
    with pytest.raises(RuntimeError, match="not a tensor to compute with"):
        proxy + 1
