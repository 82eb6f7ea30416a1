"""The bounds of documents are read from a batch as they are, and random keys name a document, not where it lies."""

import torch

from lightning_megatron.context.documents import documents_of


def test_documents_are_found_row_by_row_with_gaps_left_out() -> None:
    documents = documents_of(torch.tensor([[0, 0, 1, 2, 2, -1], [-1, -1, -1, -1, -1, -1], [-1, 3, 3, 3, -1, 7]]))
    assert documents.lengths == (2, 1, 2, 3, 1)
    assert documents.names == ((0, 0), (0, 1), (0, 2), (2, 3), (2, 7))
    assert documents.index_X.tolist() == [0, 1, 2, 3, 4, 13, 14, 15, 17]
    assert documents.positions_X.tolist() == [0, 1, 0, 0, 1, 0, 1, 2, 0]
    assert documents.rows_X.tolist() == [0, 0, 0, 0, 0, 2, 2, 2, 2]
    assert documents.numbers_X.tolist() == [0, 0, 1, 2, 2, 3, 3, 3, 7]


def test_equal_numbers_in_neighbouring_rows_are_two_documents() -> None:
    assert documents_of(torch.tensor([[0, 0], [0, 0]])).lengths == (2, 2)


def test_a_batch_of_padding_has_no_document() -> None:
    documents = documents_of(torch.full((2, 3), -1))
    assert documents.lengths == () and len(documents.index_X) == 0


def test_keys_name_the_document_and_the_position_in_it() -> None:
    samples = torch.tensor([11, 12])
    here = documents_of(torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]))
    moved = documents_of(torch.tensor([[-1, -1, 1, 1, 1], [0, 0, 0, 0, 0]]))
    assert torch.equal(here.token_keys(samples)[2:], moved.token_keys(samples))
    assert len(set(here.token_keys(samples).tolist())) == 10
