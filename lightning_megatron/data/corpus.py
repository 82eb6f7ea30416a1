"""A corpus of tokens: sequences, which make up documents.

Between the files and the samples. The tokens are one array, in memory or mapped. For GPT and T5 a document is mostly
one sequence; for BERT a sequence is a sentence.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.packing import Numbers

TokenArray = NDArray[np.integer[Any]]


class TokenCorpus:
    """Sequence i is `lengths[i]` tokens from byte `pointers[i]` on; document d is the sequences from
    `document_bounds[d]` to before `document_bounds[d + 1]`. Sequences lie one after the other, without gaps."""

    def __init__(self, tokens: TokenArray, lengths: Numbers, pointers: Numbers, document_bounds: Numbers) -> None:
        self.tokens = tokens
        self.lengths = lengths
        self.pointers = pointers
        self.document_bounds = document_bounds

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.document_bounds) - 1

    def sequence(self, index: int) -> TokenArray:
        """The tokens of one sequence."""
        if not 0 <= index < self.num_sequences:
            raise IndexError(f"sequence {index} of {self.num_sequences}")
        start = int(self.pointers[index]) // self.tokens.itemsize
        return self.tokens[start : start + int(self.lengths[index])]

    def document_start(self, index: int) -> int:
        """Index in `tokens` at which a document starts."""
        first = int(self.document_bounds[index])
        return int(self.pointers[first]) // self.tokens.itemsize if first < self.num_sequences else len(self.tokens)

    def document_sizes(self) -> Numbers:
        """Tokens of each document: [documents]."""
        starts = np.append(self.pointers // self.tokens.itemsize, len(self.tokens))
        sizes: Numbers = np.diff(starts[self.document_bounds])
        return sizes


def corpus_in_memory(documents: Iterable[Sequence[Sequence[int]]]) -> TokenCorpus:
    """The corpus of documents given as the token ids of their sequences."""
    listed = [[np.array(ids, dtype=np.int64) for ids in document] for document in documents]
    sequences = [ids for document in listed for ids in document]
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
    tokens = np.concatenate([np.empty(0, dtype=np.int64), *sequences])
    return TokenCorpus(
        tokens,
        lengths,
        (np.cumsum(lengths) - lengths) * tokens.itemsize,
        np.cumsum([0, *(len(document) for document in listed)], dtype=np.int64),
    )
