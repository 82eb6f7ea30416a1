"""Samples for next-token prediction: documents concatenated in a random order, cut into one length.

Between a corpus and the sampler. Each epoch concatenates all documents in its own order, and epochs follow each other
in one stream. Stretch j is the tokens [j*s, j*s + s] of that stream: neighbours share one token, the last target of one
and the first input of the next, so N samples need N*s + 1 tokens.

Samples come in a random order too, epoch by epoch: first, shuffled, the stretches that start in epoch 0, then those of
epoch 1, and so on; the last epoch, of which often a part is enough, comes last. So nothing is seen twice before all
was seen once. All of it is a function of the documents' sizes, s, N and the seed.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron.data.corpus import TokenArray, TokenCorpus
from lightning_megatron.data.index_cache import cached_index
from lightning_megatron.data.megatron_files import MegatronCorpus, megatron_paths
from lightning_megatron.data.packing import Numbers
from lightning_megatron.data.seeded_random import random_order

_FORM = 1
"""Version of the written index: an index of another version is not read."""


@dataclass(frozen=True, kw_only=True)
class StretchIndex:
    """The stretch of each sample, and each epoch's order of the documents."""

    order: Numbers
    """Number of each sample's stretch: [samples]."""
    documents: Numbers
    """Numbers of the documents in each epoch's order: [epochs, documents]."""
    ends: Numbers
    """Tokens of the epoch up to the end of each document: [epochs, documents]."""

    @staticmethod
    def of(sizes: Numbers, sequence_length: int, num_samples: int, seed: int) -> "StretchIndex":
        """The index of `num_samples` samples of documents of `sizes` tokens."""
        num_tokens = int(sizes.sum())
        num_epochs = -(-(num_samples * sequence_length + 1) // num_tokens)
        documents = np.stack([random_order(len(sizes), seed, "documents of epoch", e) for e in range(num_epochs)])
        # Stretch j starts in epoch e where e * num_tokens <= j * sequence_length.
        firsts = [min(-(-e * num_tokens // sequence_length), num_samples) for e in range(num_epochs + 1)]
        order = np.empty(num_samples, dtype=np.int64)
        for epoch, (first, last) in enumerate(pairwise(firsts)):
            order[first:last] = random_order(last - first, seed, "stretches of epoch", epoch)
            order[first:last] += first
        return StretchIndex(order=order, documents=documents, ends=np.cumsum(sizes[documents], axis=1, dtype=np.int64))

    def flat(self) -> Numbers:
        """The index as one array [2 + samples + 2 epochs documents]."""
        sizes = np.array([len(self.order), len(self.documents)], dtype=np.int64)
        return np.concatenate([sizes, self.order, self.documents.ravel(), self.ends.ravel()])

    @staticmethod
    def from_flat(flat: Numbers) -> "StretchIndex":
        num_samples, num_epochs = int(flat[0]), int(flat[1])
        order, rest = np.split(flat[2:], [num_samples])
        documents, ends = rest.reshape(2, num_epochs, -1)
        return StretchIndex(order=order, documents=documents, ends=ends)


class DocumentStretches(Dataset[dict[str, Tensor]]):
    """Samples of `sequence_length` tokens from a corpus, by an index."""

    def __init__(self, corpus: TokenCorpus, index: StretchIndex, sequence_length: int) -> None:
        self.corpus = corpus
        self.index = index
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return len(self.index.order)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`tokens` [s], `labels` [s] (the next token of each position) and `loss_mask` [s], all ones."""
        ids = torch.from_numpy(self.sample_tokens(index))
        # A copy: a label that is changed in place must not change the token of the next position.
        return {"tokens": ids[:-1].clone(), "labels": ids[1:].clone(), "loss_mask": torch.ones(len(ids) - 1)}

    def sample_tokens(self, index: int) -> TokenArray:
        """The tokens of sample `index`: int64 [s + 1]."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        num_left = self.sequence_length + 1
        epoch, position = divmod(int(self.index.order[index]) * self.sequence_length, int(self.index.ends[0, -1]))
        parts = []
        while num_left:
            ends, documents = self.index.ends[epoch], self.index.documents[epoch]
            # The first document that ends after the position: those without tokens are passed over.
            at = int(np.searchsorted(ends, position, side="right"))
            while num_left and at < len(ends):
                num_taken = min(int(ends[at]) - position, num_left)
                if num_taken:
                    start = int(ends[at - 1]) if at else 0
                    first = self.corpus.document_start(int(documents[at])) + position - start
                    parts.append(self.corpus.tokens[first : first + num_taken])
                num_left, position, at = num_left - num_taken, position + num_taken, at + 1
            epoch, position = epoch + 1, 0
        return np.concatenate(parts).astype(np.int64)


class GPTSamples(DocumentStretches):
    """`DocumentStretches` of Megatron's `PREFIX.bin` and `PREFIX.idx`.

    There are `num_samples`, of as many epochs as it takes; 0 is as many as one epoch gives. They are shuffled already:
    a sampler should not shuffle them. The first call writes the index; all processes map it, and a copy sent to a
    loader's worker carries the prefix alone.
    """

    def __init__(
        self,
        prefix: str | Path,
        sequence_length: int,
        *,
        num_samples: int = 0,
        seed: int = 0,
        documents: tuple[int, int] | None = None,
        index_directory: str | Path | None = None,
    ) -> None:
        """`documents` is the range (first, last + 1) of those that count; None: all. The index is written into
        `index_directory`, or next to the files where it is not given."""
        corpus = MegatronCorpus(prefix, documents)
        self._options: dict[str, Any] = {
            "num_samples": num_samples,
            "seed": seed,
            "documents": documents,
            "index_directory": index_directory,
        }
        count = checked_count(corpus.document_sizes(), sequence_length, num_samples, corpus.prefix)
        key = hashlib.sha256(f"{sequence_length} {count} {seed} {documents}".encode()).hexdigest()[:8]
        flat = cached_index(
            megatron_paths(prefix)[1],
            f"stretches-{key}",
            _FORM,
            lambda: StretchIndex.of(corpus.document_sizes(), sequence_length, count, seed).flat(),
            index_directory,
        )
        self.prefix = corpus.prefix
        super().__init__(corpus, StretchIndex.from_flat(flat), sequence_length)

    def __reduce__(self) -> tuple[Callable[..., "GPTSamples"], tuple[str, int]]:
        # A memory-mapped array pickles as all that it maps.
        return partial(GPTSamples, **self._options), (self.prefix, self.sequence_length)


def checked_count(sizes: Numbers, sequence_length: int, num_samples: int, what: str) -> int:
    """Number of samples: `num_samples`, or as many as one epoch gives. Raises ValueError where there is none."""
    if sequence_length < 1:
        raise ValueError(f"sequence_length ({sequence_length}) must be at least 1")
    if num_samples < 0:
        raise ValueError(f"num_samples ({num_samples}) must be at least 1, or 0 for as many as one epoch gives")
    num_tokens = int(sizes.sum())
    count = num_samples or max(num_tokens - 1, 0) // sequence_length
    if count == 0 or num_tokens == 0:
        raise ValueError(
            f"{what} has {num_tokens} tokens in {len(sizes)} documents, too few for one sample of sequence_length"
            f" ({sequence_length}), which takes {sequence_length + 1}; give more text, or a sequence_length of at most"
            f" {max(num_tokens - 1, 0)}"
        )
    return count
