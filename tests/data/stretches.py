"""Samples of documents in memory, cut as those of token files are."""

from collections.abc import Iterable, Sequence

from lightning_megatron.data import DocumentStretches, corpus_in_memory
from lightning_megatron.data.gpt_samples import StretchIndex, checked_count


def cut_in_stretches(
    token_ids: Iterable[Sequence[int]], sequence_length: int, *, num_samples: int = 0, seed: int = 0
) -> DocumentStretches:
    """Samples in memory of the documents' tokens, taken as they are; 0 samples are as many as one epoch gives."""
    corpus = corpus_in_memory([ids] for ids in token_ids)
    sizes = corpus.document_sizes()
    count = checked_count(sizes, sequence_length, num_samples, "the corpus")
    return DocumentStretches(corpus, StretchIndex.of(sizes, sequence_length, count, seed), sequence_length)
