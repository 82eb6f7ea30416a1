"""Several samples packed in one row, which attention keeps apart by `segments`.

Between packing and collation. A row of length s that holds samples of 3 and 2 positions:

    segments    0    0    0    1    1   -1 ...    the number of the sample within its row; -1: an unused position
    tokens      a0   a1   a2   b0   b1   end of text ...
    labels      a1   a2   a3   b1   b2  -100 ...
    loss_mask   1    1    1    1    1    0 ...
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position without a target, as torch's cross entropy ignores it."""

NO_SEGMENT = -1
"""Segment of the unused positions at the end of a row."""


def join_samples(samples: Sequence[Mapping[str, Tensor]], sequence_length: int, end_of_text: int) -> dict[str, Tensor]:
    """One row of the samples' `tokens`, `labels` and `loss_mask`, concatenated, and its `segments`: each [s].

    Raises ValueError for samples that are together longer than `sequence_length`.
    """
    fills = {"tokens": end_of_text, "labels": IGNORE_INDEX, "loss_mask": 0}
    return join_entries(samples, sequence_length, fills=fills, segments="segments")


def join_entries(
    samples: Sequence[Mapping[str, Tensor]], row_length: int, *, fills: Mapping[str, int], segments: str
) -> dict[str, Tensor]:
    """One row of entries of any names, padded at its end with each one's value in `fills`, and its segments under the
    name `segments`."""
    first, *_ = fills
    lengths = [len(sample[first]) for sample in samples]
    unused = row_length - sum(lengths)
    if unused < 0:
        raise ValueError(
            f"{len(samples)} samples of together {sum(lengths)} {first} do not fit a row of {row_length}; pack_lengths"
            " says which do, and pack_pairs where each sample lies in two rows"
        )
    row = {
        name: torch.cat([*(sample[name] for sample in samples), samples[0][name].new_full((unused,), fill)])
        for name, fill in fills.items()
    }
    numbers = torch.tensor([*range(len(samples)), NO_SEGMENT])
    row[segments] = numbers.repeat_interleave(torch.tensor([*lengths, unused]))
    return row
