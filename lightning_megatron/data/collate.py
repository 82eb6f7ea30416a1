"""Collation of samples to a batch.

Last on the path from text to batches: what a loader hands to `training_step`.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Sample = dict[str, Tensor]
"""Entries of a sample, or of a batch of them."""


def collate_tokens(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Each entry of the samples, stacked: [s] of every sample becomes [batch, s].

    Raises ValueError for samples that differ in entries or lengths.
    """
    shapes = {name: tuple(value.shape) for name, value in samples[0].items()}
    for index, sample in enumerate(samples):
        if (found := {name: tuple(value.shape) for name, value in sample.items()}) != shapes:
            raise ValueError(
                f"sample {index} of a batch holds {found} and sample 0 holds {shapes}; the samples of a batch must"
                " have the same entries and lengths: pack documents to one sequence_length"
            )
    return {name: torch.stack([sample[name] for sample in samples]) for name in shapes}


def collate_padded(
    samples: Sequence[Mapping[str, Tensor]], *, padding: Mapping[str, int], multiple: int
) -> dict[str, Tensor]:
    """Each entry of the samples, padded at the end with its value in `padding` and stacked: [batch, s].

    s is the length of the longest sample of the batch, rounded up to a `multiple`.
    """
    longest = max(len(value) for sample in samples for value in sample.values())
    length = -(-longest // multiple) * multiple
    return {
        name: torch.stack([F.pad(sample[name], (0, length - len(sample[name])), value=fill) for sample in samples])
        for name, fill in padding.items()
    }
