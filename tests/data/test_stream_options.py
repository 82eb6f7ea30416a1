"""Options of a stream, by hand: segments, what has no target, and gaps to fill."""

import numpy as np
import pytest
import torch

from lightning_megatron.data import FillInTheMiddle, fill_documents
from lightning_megatron.data.stream_options import StreamOptions, StreamSamples
from tests.data.stretches import cut_in_stretches

STRETCH = np.array([5, 6, 0, 7, 8, 0, 0, 9, 4])


def test_without_options_a_stretch_is_tokens_and_the_tokens_after_them() -> None:
    sample = StreamOptions().sample(STRETCH, 0)
    assert {name: value.tolist() for name, value in sample.items()} == {
        "tokens": [5, 6, 0, 7, 8, 0, 0, 9],
        "labels": [6, 0, 7, 8, 0, 0, 9, 4],
        "loss_mask": [1.0] * 8,
    }
    sample["labels"][0] = -1
    assert sample["tokens"][1] == 6 and STRETCH[1] == 6


def test_an_end_of_text_belongs_to_the_document_that_it_ends() -> None:
    sample = StreamOptions(end_of_text=0, separates_documents=True).sample(STRETCH, 0)
    assert sample["segments"].tolist() == [0, 0, 0, 1, 1, 1, 2, 3]
    assert sample["segments"].dtype == torch.int64
    assert sample["loss_mask"].tolist() == [1.0] * 8


def test_what_follows_an_end_of_text_is_nothing_to_learn() -> None:
    sample = StreamOptions(end_of_text=0, masks_end_of_text=True).sample(STRETCH, 0)
    assert sample["loss_mask"].tolist() == [1, 1, 0, 1, 1, 0, 0, 1]
    assert sample.keys() == {"tokens", "labels", "loss_mask"}


def test_gaps_are_filled_before_documents_are_distinguished() -> None:
    fill = FillInTheMiddle(prefix_token=1, suffix_token=2, middle_token=3, rate=1.0)
    options = StreamOptions(end_of_text=0, fill=fill, separates_documents=True, seed=5)
    stretches = cut_in_stretches([[5, 6, 7, 8, 0], [9, 5, 6, 7, 0]], 9)
    sample = StreamSamples(stretches, options)[0]
    wanted = fill_documents(stretches.sample_tokens(0), fill, 0, seed=5, sample=0)
    assert torch.cat([sample["tokens"], sample["labels"][-1:]]).tolist() == wanted.tolist()
    assert sample["segments"].tolist() == np.cumsum([0, *(wanted[:-2] == 0)]).tolist()
    other = options.sample(stretches.sample_tokens(0), 1)
    assert other["tokens"].tolist() != sample["tokens"].tolist()


@pytest.mark.parametrize("option", ["separates_documents", "masks_end_of_text", "fill"])
def test_documents_cannot_be_distinguished_without_an_end_of_text(option: str) -> None:
    fill = FillInTheMiddle(prefix_token=1, suffix_token=2, middle_token=3)
    with pytest.raises(ValueError, match="say which token"):
        StreamOptions(**{option: fill if option == "fill" else True})  # type: ignore[arg-type]
