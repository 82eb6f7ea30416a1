"""Bin packing of documents into rows: pure arithmetic on their lengths.

Documents are taken in a random order and in windows of it, each of about `WINDOW_ROWS` full rows. Within a window the
longest comes first, and each goes to the fullest row that still has room (best fit, decreasing). Then the rows are put
in a random order, and the documents of each row too: their positions do not depend on their lengths. Source of the
rule: Johnson et al. 1974.

Of texts in pairs, for two stacks that each have a row, the one with the larger share of its row comes first, and goes
to the first row with room for both of its texts (first fit, decreasing).
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
LongDocuments = Literal["split", "drop", "refuse"]

WINDOW_ROWS = 1024
"""Full rows that the documents of a window would make. More of them fill rows better, and take longer."""


@dataclass(frozen=True, kw_only=True)
class DocumentPieces:
    """Pieces of documents to pack: piece i is `lengths[i]` long and starts `starts[i]` after its document's start."""

    documents: Numbers
    """The number of each piece's document, in order."""
    starts: Numbers
    lengths: Numbers
    num_long: int
    """Documents longer than a row."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Packed rows: row r holds the documents `order[ends[r - 1] : ends[r]]`, one after the other."""

    order: Numbers
    """Each document's number once, row after row."""
    ends: Numbers
    """End of each row in `order`."""

    @property
    def num_rows(self) -> int:
        return len(self.ends)

    def row(self, index: int) -> slice:
        """Slice of `order` with the documents of a row."""
        return row_of(self.ends, index)


def row_of(ends: Numbers, index: int) -> slice:
    """The slice of row `index`, where rows end at `ends`. Raises IndexError where there is none."""
    if not 0 <= index < len(ends):
        raise IndexError(f"row {index} of {len(ends)}")
    return slice(int(ends[index - 1]) if index else 0, int(ends[index]))


def cut_documents(lengths: Numbers, sequence_length: int, long_documents: LongDocuments) -> DocumentPieces:
    """The pieces to pack: documents that fit a row, and of longer ones what `long_documents` leaves.

    "split" cuts them every `sequence_length`, and each piece is a document of its own; "drop" leaves them out; "refuse"
    raises ValueError. Documents of no length are left out.
    """
    if long_documents not in get_args(LongDocuments):
        raise ValueError(f"long_documents ({long_documents!r}) must be {_alternatives(LongDocuments)}")
    if sequence_length < 1:
        raise ValueError(f"sequence_length ({sequence_length}) must be at least 1")
    is_long = lengths > sequence_length
    num_long = int(np.count_nonzero(is_long))
    if num_long and long_documents == "refuse":
        longest = int(np.argmax(lengths))
        raise ValueError(
            f"{num_long} of {len(lengths)} documents are longer than sequence_length ({sequence_length}): the longest,"
            f" number {longest} from 0, takes {lengths[longest]}; raise sequence_length to {lengths[longest]}, or set"
            " long_documents to 'split' (pieces that do not see each other) or 'drop'"
        )
    nums_pieces = -(-lengths // sequence_length)
    if long_documents == "drop":
        nums_pieces[is_long] = 0
    documents = np.repeat(np.arange(len(lengths), dtype=np.int64), nums_pieces)
    num_before = np.repeat(np.cumsum(nums_pieces) - nums_pieces, nums_pieces)
    starts = (np.arange(len(documents), dtype=np.int64) - num_before) * sequence_length
    if len(documents) == 0:
        raise ValueError(
            f"none of the {len(lengths)} documents is left for rows of sequence_length ({sequence_length}):"
            f" {num_long} are longer and long_documents is {long_documents!r}, and {len(lengths) - num_long} are too"
            " short to have anything to predict; give more text, a larger sequence_length, or long_documents='split'"
        )
    return DocumentPieces(
        documents=documents,
        starts=starts,
        lengths=np.minimum(lengths[documents] - starts, sequence_length),
        num_long=num_long,
    )


def pack_lengths(lengths: Numbers, sequence_length: int, seed: int = 0) -> Packing:
    """The rows of documents, none longer than `sequence_length`: a function of the arguments alone.

    Raises ValueError unless there are documents and each length is from 1 to `sequence_length`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) == 0 or lengths.min() < 1 or lengths.max() > sequence_length:
        found = f"{lengths.min()} to {lengths.max()}" if len(lengths) else "none"
        raise ValueError(
            f"the lengths of documents ({found}) must be from 1 to sequence_length ({sequence_length}) to be packed;"
            " cut_documents makes them so"
        )
    return _pack(lengths, sequence_length, lambda some: _best_fit(lengths[some].tolist(), sequence_length), seed)


def pack_pairs(lengths_N2: Numbers, row_lengths: tuple[int, int], seed: int = 0) -> Packing:
    """The rows of pairs of texts: first texts share a row of the first length, second texts one of the second.

    Raises ValueError unless there are pairs and each length is from 1 to that of its row.
    """
    lengths_N2 = np.asarray(lengths_N2, dtype=np.int64).reshape(-1, 2)
    if len(lengths_N2) == 0 or lengths_N2.min() < 1 or (lengths_N2 > row_lengths).any():
        found = f"up to {lengths_N2.max(axis=0).tolist()}" if len(lengths_N2) else "none"
        raise ValueError(f"the lengths of pairs ({found}) must be from 1 to those of rows {row_lengths} to be packed")
    # Shares of a row, as integers.
    sizes = (lengths_N2 * row_lengths[::-1]).max(axis=1)
    return _pack(sizes, row_lengths[0] * row_lengths[1], lambda some: _first_fit(lengths_N2[some], row_lengths), seed)


def _pack(lengths: Numbers, row_length: int, fit: Callable[[Numbers], tuple[list[int], int]], seed: int) -> Packing:
    """The rows of all documents, window by window of a random order: `fit` gets a window's documents, longest first,
    and returns their rows and the number of these."""
    # The older generator of numpy, whose draws are promised to stay.
    draw = np.random.RandomState(np.frombuffer(hashlib.sha256(f"rows {seed}".encode()).digest(), dtype="<u4"))
    drawn = draw.permutation(len(lengths)).astype(np.int64)
    sizes = lengths[drawn]
    windows = (np.cumsum(sizes) - sizes) // (WINDOW_ROWS * row_length)
    by_size = np.lexsort((-sizes, windows))
    row_of_drawn = np.empty(len(lengths), dtype=np.int64)
    num_rows = 0
    for window in np.split(by_size, np.flatnonzero(np.diff(windows)) + 1):
        rows, num_of_window = fit(drawn[window])
        row_of_drawn[window] = np.array(rows, dtype=np.int64) + num_rows
        num_rows += num_of_window
    row_of_drawn = draw.permutation(num_rows).astype(np.int64)[row_of_drawn]
    # Not the order of the first draw: of equally long documents the ones drawn first are in the fullest rows.
    order = drawn[np.lexsort((draw.permutation(len(lengths)), row_of_drawn))]
    return Packing(order=order, ends=np.cumsum(np.bincount(row_of_drawn, minlength=num_rows)))


def _best_fit(sizes: list[int], sequence_length: int) -> tuple[list[int], int]:
    """The row of each document, each in the fullest that has room for it, and how many rows there are."""
    # A row with room is room * scale + row in a sorted list: the first from size * scale on is the fullest that fits.
    scale = len(sizes)
    with_room: list[int] = []
    rows: list[int] = []
    num_rows = 0
    for size in sizes:
        index = bisect_left(with_room, size * scale)
        if index < len(with_room):
            room, row = divmod(with_room.pop(index), scale)
        else:
            room, row = sequence_length, num_rows
            num_rows += 1
        rows.append(row)
        if room > size:
            insort(with_room, (room - size) * scale + row)
    return rows, num_rows


def _first_fit(lengths_N2: Numbers, row_lengths: tuple[int, int]) -> tuple[list[int], int]:
    """The row of each pair, the first that has room for both, and how many rows there are."""
    room_R2 = np.empty((len(lengths_N2), 2), dtype=np.int64)
    rows: list[int] = []
    num_rows = 0
    for lengths in lengths_N2:
        fits = (room_R2[:num_rows] >= lengths).all(axis=1)
        row = int(fits.argmax()) if fits.any() else num_rows
        if row == num_rows:
            room_R2[row] = row_lengths
            num_rows += 1
        room_R2[row] -= lengths
        rows.append(row)
    return rows, num_rows


def _alternatives(choice: Any) -> str:
    *first, last = (repr(value) for value in get_args(choice))
    return f"{', '.join(first)} or {last}"
