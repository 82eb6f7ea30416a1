"""Whole documents in rows of one length, several in a row, separated by `segments`.

An alternative to `gpt_samples.py` over the same token files. A document of n tokens, its end of text included, has
n - 1 positions: its tokens but the last, and as their labels its tokens but the first. The end of text is a label and
never an input, and nothing is predicted from one document to the next.

The assignment of documents to rows is computed once and written next to the token files; all processes map it.
Rows depend on the seed and not on the epoch: so every epoch has the same number of them, by which a resumed run finds
its position; the sampler gives each epoch its own order of the rows.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron.data.corpus import TokenArray
from lightning_megatron.data.index_cache import cached_index
from lightning_megatron.data.megatron_files import MegatronCorpus, megatron_paths
from lightning_megatron.data.packed_rows import join_samples
from lightning_megatron.data.packing import LongDocuments, Numbers, cut_documents, pack_lengths, row_of

_FORM = 1
"""Version of the written tables: a table of another version is not read."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Counts of packed documents and of their rows."""

    num_documents: int
    num_long: int
    """Documents that are longer than a row."""
    num_positions: int
    """Positions of all rows, unused ends left out."""
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class RowTable:
    """The pieces of documents in each packed row, as positions in the corpus's tokens."""

    packed: Packed
    ends: Numbers
    """End of each row in `pieces`: [rows]."""
    pieces: Numbers
    """First token and number of positions of each piece, row after row: [pieces, 2]."""

    @staticmethod
    def of(document_ends: Numbers, sequence_length: int, seed: int, long_documents: LongDocuments) -> "RowTable":
        """The packed rows of documents that end (each before token i) at `document_ends`."""
        sizes = np.diff(document_ends, prepend=0)
        cut = cut_documents(np.maximum(sizes - 1, 0), sequence_length, long_documents)
        packing = pack_lengths(cut.lengths, sequence_length, seed)
        first = (document_ends - sizes)[cut.documents] + cut.starts
        packed = Packed(
            num_documents=len(sizes),
            num_long=cut.num_long,
            num_positions=int(cut.lengths.sum()),
            num_rows=packing.num_rows,
        )
        pieces = np.stack([first, cut.lengths], axis=1)[packing.order]
        return RowTable(packed=packed, ends=packing.ends, pieces=pieces)

    def flat(self) -> Numbers:
        """The table as one array [4 + rows + 2 pieces]."""
        return np.concatenate([np.array(astuple(self.packed), dtype=np.int64), self.ends, self.pieces.ravel()])

    @staticmethod
    def from_flat(flat: Numbers) -> "RowTable":
        names = list(Packed.__dataclass_fields__)
        packed = Packed(**{name: int(value) for name, value in zip(names, flat, strict=False)})
        ends, pieces = np.split(flat[len(names) :], [packed.num_rows])
        return RowTable(packed=packed, ends=ends, pieces=pieces.reshape(-1, 2))


class DocumentRows(Dataset[dict[str, Tensor]]):
    """Samples for next-token prediction that hold whole documents, from tokens in memory or mapped."""

    def __init__(self, tokens: TokenArray, table: RowTable, sequence_length: int, end_of_text: int) -> None:
        self.tokens = tokens
        self.table = table
        self.sequence_length = sequence_length
        self.end_of_text = end_of_text

    def __len__(self) -> int:
        return len(self.table.ends)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`tokens`, `labels`, `loss_mask` and `segments`, each [s], as `join_samples` returns them."""
        pieces = self.table.pieces[row_of(self.table.ends, index)].tolist()
        samples = [self._sample(first, length) for first, length in pieces]
        return join_samples(samples, self.sequence_length, self.end_of_text)

    def _sample(self, first: int, length: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self.tokens[first : first + length + 1].astype(np.int64))
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": torch.ones(length)}


class PackedDocuments(DocumentRows):
    """`DocumentRows` of Megatron's `PREFIX.bin` and `PREFIX.idx`, whose documents end with the end of text.

    `long_documents` is for those that do not fit a row: "split" cuts them into pieces that do not attend to each other,
    "drop" leaves them out, "refuse" raises ValueError. All processes of a machine map the same files, and a
    copy sent to a loader's worker carries the prefix alone. The first call writes the table.
    """

    def __init__(
        self,
        prefix: str | Path,
        sequence_length: int,
        *,
        end_of_text: int,
        seed: int = 0,
        long_documents: LongDocuments = "split",
        documents: tuple[int, int] | None = None,
        index_directory: str | Path | None = None,
    ) -> None:
        """`documents` is the range (first, last + 1) of those that count; None: all. The table is written into
        `index_directory`, or next to the files where it is not given."""
        corpus = MegatronCorpus(prefix, documents)
        self.prefix = corpus.prefix
        self._long_documents = long_documents
        self._options: dict[str, Any] = {
            "end_of_text": end_of_text,
            "seed": seed,
            "long_documents": long_documents,
            "documents": documents,
            "index_directory": index_directory,
        }
        key = f"{sequence_length} {seed} {long_documents} {documents}"
        flat = cached_index(
            megatron_paths(prefix)[1],
            f"rows-{hashlib.sha256(key.encode()).hexdigest()[:8]}",
            _FORM,
            lambda: RowTable.of(np.cumsum(corpus.document_sizes()), sequence_length, seed, long_documents).flat(),
            index_directory,
        )
        # The table counts from the first token of the first document.
        tokens = corpus.tokens[corpus.document_start(0) :] if corpus.num_documents else corpus.tokens
        super().__init__(tokens, RowTable.from_flat(flat), sequence_length, end_of_text)

    def __reduce__(self) -> tuple[Callable[..., "PackedDocuments"], tuple[str, int]]:
        # A memory-mapped array pickles as all of its tokens.
        return partial(PackedDocuments, **self._options), (self.prefix, self.sequence_length)

    def __str__(self) -> str:
        packed = self.table.packed
        fill = packed.num_positions / (packed.num_rows * self.sequence_length)
        text = f"{packed.num_documents} documents in {packed.num_rows} rows of {self.sequence_length}, {fill:.1%} full"
        became = {"split": "cut into pieces that do not see each other", "drop": "dropped", "refuse": "refused"}
        return (
            f"{text}; {packed.num_long} of them were longer and {became[self._long_documents]}"
            if packed.num_long
            else text
        )


def pack_rows(
    token_ids: Iterable[Sequence[int]],
    sequence_length: int,
    *,
    end_of_text: int,
    seed: int = 0,
    long_documents: LongDocuments = "split",
) -> DocumentRows:
    """Rows in memory of the documents' tokens, each document followed by the end of text."""
    documents = [np.array([*ids, end_of_text], dtype=np.int64) for ids in token_ids]
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    table = RowTable.of(ends, sequence_length, seed, long_documents)
    return DocumentRows(np.concatenate(documents), table, sequence_length, end_of_text)
