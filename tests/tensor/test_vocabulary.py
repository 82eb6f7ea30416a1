"""Tests of who holds which entry of a cut vocabulary."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.sharding import cut_length
from lightning_megatron.tensor.vocabulary import num_own, own_entries


@given(st.integers(1, 300), st.integers(1, 8), st.sampled_from([1, 8, 128]))
def test_every_id_is_held_by_exactly_one_rank_at_the_index_where_it_belongs(
    vocab_size: int, size: int, multiple: int
) -> None:
    ids = torch.arange(vocab_size)
    num_held = torch.zeros(vocab_size, dtype=torch.int64)
    for rank in range(size):
        tp = Mesh.imagine(rank, Sizes(world=size, tp=size)).tp
        length = cut_length(vocab_size, tp, multiple)
        index, is_foreign = own_entries(ids, vocab_size, length, tp)
        is_own = torch.ones_like(ids, dtype=torch.bool) if is_foreign is None else ~is_foreign
        num_held += is_own
        assert (index[is_own] + rank * length).equal(ids[is_own])
        # A look-up takes the others too.
        assert ((index >= 0) & (index < length)).all()
        assert is_own.sum() == num_own(vocab_size, length, tp)
    assert num_held.eq(1).all()


def test_an_id_outside_of_the_vocabulary_has_an_index_that_no_look_up_takes() -> None:
    for rank in range(2):
        tp = Mesh.imagine(rank, Sizes(world=2, tp=2)).tp
        # 131 ids in two parts of 128: 200 lies in the padding of rank 1, 300 beyond it.
        index, is_foreign = own_entries(torch.tensor([-1, 131, 200, 300, -100]), 131, 128, tp)
        assert index.eq(-1).all() and is_foreign is not None and is_foreign.all()


def test_a_rank_that_holds_every_entry_masks_none_and_takes_no_other() -> None:
    tp = Mesh.single().tp
    for length in (131, 256):
        index, is_foreign = own_entries(torch.tensor([0, 130, -1, 131, 200, 300]), 131, length, tp)
        assert is_foreign is None and index[:2].tolist() == [0, 130]
        assert ((index[2:] < 0) | (index[2:] >= length)).all()
