"""The documents of a packed batch: which tokens of [batch, sequence] are one segment.

Bounds are read and checked here once, on the host; the attention mask follows from them alone. What each token needs
to know of its document is made on the device, of a few numbers for each document.

B batch, S sequence, X tokens of all documents, in order.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from lightning_megatron.comm import rng
from lightning_megatron.comm.host_numbers import on_device

NO_DOCUMENT = -1
"""Value of `segments` where a row has no document."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Positions of documents in a batch; `documents_of` reads them. X tokens, D documents."""

    lengths: tuple[int, ...]
    """Length of each document in tokens, row after row."""
    names: tuple[tuple[int, int], ...]
    """Row of each document and its number there."""
    starts: tuple[int, ...]
    """Index of each document's first token in the flattened batch."""
    device: torch.device
    """Device of the batch's tokens."""

    @property
    def num_tokens(self) -> int:
        """X: the tokens of all documents."""
        return sum(self.lengths)

    @cached_property
    def _table_5D(self) -> Tensor:
        """Length, place of the first token, its index in the batch, row and number of each document: int64 [5, D]."""
        rows_and_numbers = zip(*self.names, strict=True) if self.names else ((), ())
        places = accumulate(self.lengths[:-1], initial=0) if self.lengths else ()
        return on_device([self.lengths, [*places], self.starts, *rows_and_numbers], self.device)

    def _spread(self, values_D: Tensor) -> Tensor:
        """For each token the value of its document: [X]."""
        return values_D.repeat_interleave(self._table_5D[0], output_size=self.num_tokens)

    def _from(self, firsts_D: Tensor) -> Tensor:
        """Numbers of each document's tokens from its first on: [X]."""
        return torch.arange(self.num_tokens, device=self.device) + self._spread(firsts_D - self._table_5D[1])

    @cached_property
    def index_X(self) -> Tensor:
        """Index of each token in the flattened batch: int64."""
        return self._from(self._table_5D[2])

    @cached_property
    def rows_X(self) -> Tensor:
        """Row of each token: int64."""
        return self._spread(self._table_5D[3])

    @cached_property
    def numbers_X(self) -> Tensor:
        """Number of each token's document in its row: int64."""
        return self._spread(self._table_5D[4])

    @cached_property
    def positions_X(self) -> Tensor:
        """Position of each token in its document: int64."""
        return self._from(torch.zeros_like(self._table_5D[1]))

    def token_keys(self, sample_keys_B: Tensor) -> Tensor:
        """Random key of each token, int64 [X], from its document and position, not from where it was packed."""
        return self.token_keys_of(rng.bits(sample_keys_B[self._table_5D[3]], self._table_5D[4]))

    def token_keys_of(self, document_keys_D: Tensor) -> Tensor:
        """Random key of each token, int64 [X], from a key for each document."""
        return rng.bits(self._spread(document_keys_D), self.positions_X)


def documents_of(segments_BS: Tensor, device: torch.device | None = None) -> Documents:
    """The documents that `segments` [B, S] marks: each token's number of its document in its row, -1 for none.

    `device` is that of the tokens, where `segments` have stayed on the host: read from the device they would make the
    host wait for all that it has to do.
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
    lengths = torch.diff(starts, append=torch.tensor([len(index)]))
    return Documents(
        lengths=tuple(lengths.tolist()),
        names=tuple(zip(first_rows.tolist(), first_numbers.tolist(), strict=True)),
        starts=tuple(index[starts].tolist()),
        device=segments_BS.device if device is None else device,
    )


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
