"""The documents of a packed batch: which tokens of [batch, sequence] are one segment.

Bounds are read and checked here once, on the host; the attention mask follows from them alone.

B batch, S sequence, X tokens of all documents, in order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.comm import rng

NO_DOCUMENT = -1
"""Value of `segments` where a row has no document."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Positions of documents in a batch; `documents_of` reads them."""

    lengths: tuple[int, ...]
    """Length of each document in tokens, row after row."""
    names: tuple[tuple[int, int], ...]
    """Row of each document and its number there."""
    index_X: Tensor
    """Index of each token in the flattened batch: int64."""
    rows_X: Tensor
    """Row of each token: int64."""
    numbers_X: Tensor
    """Number of each token's document in its row: int64."""
    positions_X: Tensor
    """Position of each token in its document: int64."""

    def token_keys(self, sample_keys_B: Tensor) -> Tensor:
        """Random key of each token, int64 [X], from its document and position, not from where it was packed."""
        return rng.bits(rng.bits(sample_keys_B[self.rows_X], self.numbers_X), self.positions_X)

    def token_keys_of(self, document_keys_D: Tensor) -> Tensor:
        """Random key of each token, int64 [X], from a key for each document."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device=self.index_X.device)
        keys_X = document_keys_D.repeat_interleave(lengths, output_size=len(self.positions_X))
        return rng.bits(keys_X, self.positions_X)


def documents_of(segments_BS: Tensor) -> Documents:
    """The documents that `segments` [B, S] marks: each token's number of its document in its row, -1 for none.

    Raises ValueError where a document is torn, or the numbers of a row do not rise: its bounds would be a guess.
    """
    if segments_BS.dim() != 2 or segments_BS.is_floating_point():
        raise ValueError(
            f"segments ({tuple(segments_BS.shape)} of {segments_BS.dtype}) must be integers of shape [batch, sequence]"
        )
    segments = segments_BS.cpu().long()
    sequence = segments.shape[1]
    index = torch.nonzero(segments.flatten() != NO_DOCUMENT).flatten()
    rows, numbers = index // sequence, segments.flatten()[index]
    # A new document begins with a new row, a new number, or after a gap.
    begins = torch.ones(len(index), dtype=torch.bool)
    begins[1:] = (rows.diff() != 0) | (numbers.diff() != 0) | (index.diff() != 1)
    starts = torch.nonzero(begins).flatten()
    first_rows, first_numbers = rows[starts], numbers[starts]
    _require_rising(first_rows, first_numbers)
    names = tuple(zip(first_rows.tolist(), first_numbers.tolist(), strict=True))
    lengths = torch.diff(starts, append=torch.tensor([len(index)]))
    positions = torch.arange(len(index)) - starts.repeat_interleave(lengths)
    device = segments_BS.device
    return Documents(tuple(lengths.tolist()), names, *(part.to(device) for part in (index, rows, numbers, positions)))


def _require_rising(rows: Tensor, numbers: Tensor) -> None:
    """Raises ValueError unless document numbers are not negative and rise within each row."""
    if (numbers < 0).any():
        raise ValueError(
            f"segments holds {int(numbers.min())}; it must hold the number of each token's document, from 0, or "
            f"{NO_DOCUMENT} where there is none"
        )
    bad = torch.nonzero((rows.diff() == 0) & (numbers.diff() <= 0)).flatten()
    if len(bad):
        row, number = int(rows[bad[0] + 1]), int(numbers[bad[0] + 1])
        raise ValueError(
            f"segments has document {number} of row {row} after document {int(numbers[bad[0]])}; the numbers of a row "
            "must rise and each document lie in one piece: sort the documents of a row, or number them anew"
        )
