"""Options of samples that are stretches of text: fill-in-the-middle, separated documents, ends without a target.

Between stretches of tokens and collation. A stretch is s + 1 tokens, of which the first s are inputs and the last s
their targets. With the end of text 0, and both of the options about documents:

    tokens      5    6    0    7    8    0    9
    labels      6    0    7    8    0    9    4
    segments    0    0    0    1    1    1    2     an end of text belongs to the document that it ends
    loss_mask   1    1    0    1    1    0    1     what follows the end of text is not predicted

Segments limit attention to a document, and positions restart with each.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron.data.corpus import TokenArray
from lightning_megatron.data.gpt_samples import DocumentStretches
from lightning_megatron.data.middle_filling import FillInTheMiddle, fill_documents


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Options by which a stretch of tokens becomes a sample."""

    end_of_text: int | None = None
    """Token that ends each document; the options below need it."""
    fill: FillInTheMiddle | None = None
    """Reordering of documents for fill-in-the-middle."""
    separates_documents: bool = False
    """Whether samples have `segments` that separate documents."""
    masks_end_of_text: bool = False
    """Whether the prediction after an end of text is left out of the loss."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.end_of_text is None and (self.fill is not None or self.separates_documents or self.masks_end_of_text):
            raise ValueError("documents of a stream are separated by the end of text; say which token that is")

    def sample(self, ids: TokenArray, number: int) -> dict[str, Tensor]:
        """The sample of s + 1 tokens, number `number` of its source: `tokens`, `labels` and `loss_mask`, each [s], and
        `segments` [s] where documents are separated."""
        stretch = np.asarray(ids, dtype=np.int64)
        if self.fill is not None:
            assert self.end_of_text is not None
            stretch = fill_documents(stretch, self.fill, self.end_of_text, seed=self.seed, sample=number)
        ids_S1 = torch.from_numpy(stretch)
        tokens = ids_S1[:-1].clone()
        # A copy: a label that is changed in place must not change the token of the next position.
        sample = {"tokens": tokens, "labels": ids_S1[1:].clone(), "loss_mask": torch.ones(len(tokens))}
        ends = tokens == self.end_of_text if self.end_of_text is not None else torch.zeros_like(tokens)
        if self.separates_documents:
            sample["segments"] = torch.cumsum(ends, 0) - ends.long()
        if self.masks_end_of_text:
            sample["loss_mask"][ends] = 0.0
        return sample


class StreamSamples(Dataset[dict[str, Tensor]]):
    """The stretches of a corpus as samples."""

    def __init__(self, stretches: DocumentStretches, options: StreamOptions) -> None:
        self.stretches = stretches
        self.options = options

    def __len__(self) -> int:
        return len(self.stretches)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.options.sample(self.stretches.sample_tokens(index), index)
