"""Token packers: documents that come one by one are cut or packed into samples as soon as there are enough.

Under `streaming.py`. A packer takes documents and gives samples, first in, first out. Its state is the tokens that
are in no sample yet.

| packer | a sample is |
|---|---|
| `StretchPacker` | the next s + 1 tokens, of which the last is the first of the next sample |
| `DocumentPacker` | whole documents; those of some rows are packed together, so that the rows fill up |
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_megatron.data.collate import Sample
from lightning_megatron.data.corpus import TokenArray
from lightning_megatron.data.packed_documents import DocumentRows, RowTable
from lightning_megatron.data.stream_options import StreamOptions

WINDOW_ROWS = 32
"""Full rows that documents must make before they are packed. More of them fill rows better, and wait longer."""


class TokenPacker(Protocol):
    """Packer that takes documents and gives samples."""

    @property
    def num_ready(self) -> int:
        """Samples that can be taken."""
        ...

    def add(self, ids: TokenArray) -> bool:
        """Takes the tokens of a document, end of text included; returns whether any of them will be in a sample."""
        ...

    def take(self, number: int) -> Sample:
        """The next sample, which is number `number` of all."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class StretchPacker:
    """Packer that cuts the concatenation of all documents."""

    def __init__(self, sequence_length: int, options: StreamOptions) -> None:
        self.sequence_length = sequence_length
        self.options = options
        self._tokens: TokenArray = np.empty(0, dtype=np.int64)

    @property
    def num_ready(self) -> int:
        return max(len(self._tokens) - 1, 0) // self.sequence_length

    def add(self, ids: TokenArray) -> bool:
        self._tokens = np.concatenate([self._tokens, ids])
        return True

    def take(self, number: int) -> Sample:
        ids, self._tokens = self._tokens[: self.sequence_length + 1], self._tokens[self.sequence_length :]
        return self.options.sample(ids, number)

    def state_dict(self) -> dict[str, Any]:
        return _flat([self._tokens])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        [self._tokens] = _unflat(state)


class DocumentPacker:
    """Packer of documents into rows by the rules of `packing.py`, some rows at a time."""

    def __init__(
        self, sequence_length: int, *, end_of_text: int, long_documents: Literal["split", "drop"], seed: int
    ) -> None:
        self.sequence_length = sequence_length
        self.end_of_text = end_of_text
        self.long_documents: Literal["split", "drop"] = long_documents
        self.seed = seed
        # Documents that are not packed yet.
        self._waiting: list[TokenArray] = []
        # Positions that they take.
        self._num_waiting = 0
        # Documents that were packed together, and their rows.
        self._windows: deque[tuple[list[TokenArray], DocumentRows]] = deque()
        # Rows of the first window.
        self._num_taken = 0

    @property
    def num_ready(self) -> int:
        return sum(len(rows) for _, rows in self._windows) - self._num_taken

    def add(self, ids: TokenArray) -> bool:
        num_positions = len(ids) - 1
        if num_positions == 0 or (self.long_documents == "drop" and num_positions > self.sequence_length):
            return False
        self._waiting.append(ids)
        self._num_waiting += num_positions
        if self._num_waiting >= WINDOW_ROWS * self.sequence_length:
            self._pack(self._waiting)
            self._waiting, self._num_waiting = [], 0
        return True

    def _pack(self, documents: list[TokenArray]) -> None:
        ends = np.cumsum([len(ids) for ids in documents], dtype=np.int64)
        table = RowTable.of(ends, self.sequence_length, self.seed, self.long_documents)
        rows = DocumentRows(np.concatenate(documents), table, self.sequence_length, self.end_of_text)
        self._windows.append((documents, rows))

    def take(self, number: int) -> Sample:
        _, rows = self._windows[0]
        sample = rows[self._num_taken]
        self._num_taken += 1
        if self._num_taken == len(rows):
            self._windows.popleft()
            self._num_taken = 0
        return sample

    def state_dict(self) -> dict[str, Any]:
        return {
            "waiting": _flat(self._waiting),
            "windows": [_flat(documents) for documents, _ in self._windows],
            "num_taken": self._num_taken,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._waiting = _unflat(state["waiting"])
        self._num_waiting = sum(len(ids) - 1 for ids in self._waiting)
        self._windows.clear()
        for window in state["windows"]:
            self._pack(_unflat(window))
        self._num_taken = state["num_taken"]


def _flat(documents: Sequence[TokenArray]) -> dict[str, Tensor]:
    tokens = np.concatenate([np.empty(0, dtype=np.int64), *documents])
    lengths = torch.tensor([len(ids) for ids in documents], dtype=torch.int64)
    return {"tokens": torch.from_numpy(tokens.astype(np.int32)), "lengths": lengths}


def _unflat(flat: Mapping[str, Tensor]) -> list[TokenArray]:
    parts = flat["tokens"].long().split(flat["lengths"].tolist())
    return [part.numpy().copy() for part in parts]
