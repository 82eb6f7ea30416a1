"""Rows of several samples: each keeps its own, and the unused end asks for nothing."""

import pytest
import torch
from torch import Tensor

from lightning_megatron.data.packed_rows import join_entries, join_samples


def sample(first: int, length: int) -> dict[str, Tensor]:
    tokens = torch.arange(first, first + length)
    return {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.full((length,), 0.5)}


def test_samples_follow_each_other_and_the_rest_is_no_segment() -> None:
    row = join_samples([sample(10, 3), sample(20, 2)], 7, end_of_text=99)
    assert row["tokens"].tolist() == [10, 11, 12, 20, 21, 99, 99]
    assert row["labels"].tolist() == [11, 12, 13, 21, 22, -100, -100]
    assert row["loss_mask"].tolist() == [0.5, 0.5, 0.5, 0.5, 0.5, 0, 0]
    assert row["segments"].tolist() == [0, 0, 0, 1, 1, -1, -1]
    assert [row[name].dtype for name in row] == [torch.int64, torch.int64, torch.float32, torch.int64]


def test_a_full_row_has_no_unused_end() -> None:
    row = join_samples([sample(10, 1), sample(20, 1)], 2, end_of_text=99)
    assert row["segments"].tolist() == [0, 1] and row["tokens"].tolist() == [10, 20]


def test_a_label_changed_in_place_changes_no_sample() -> None:
    given = sample(10, 2)
    join_samples([given], 2, end_of_text=99)["labels"].fill_(-100)
    assert given["labels"].tolist() == [11, 12]


def test_samples_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 samples of together 5 tokens do not fit a row of 4; pack_lengths"):
        join_samples([sample(10, 3), sample(20, 2)], 4, end_of_text=99)
    answers = [{"decoder_tokens": torch.arange(length)} for length in (3, 2)]
    with pytest.raises(ValueError, match=r"together 5 decoder_tokens do not fit a row of 4; .* pack_pairs where each"):
        join_entries(answers, 4, fills={"decoder_tokens": 0}, segments="decoder_segments")
