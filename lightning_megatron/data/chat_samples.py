"""Fine-tuning samples: one row a sample, uneven in length, with labels for the answers' tokens.

Tokens of all rows are concatenated in one file, made once by one process. A sample is no longer than `sequence_length`;
the rest is cut off and counted, and a row without any label left is dropped and counted. `PackedChats` puts several
samples in one row, each a segment of its own.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron.data.atomic_file import atomic_write
from lightning_megatron.data.chat import MarkedTokens, kind_of_rows, row_encoder
from lightning_megatron.data.chat_template import ChatTemplate
from lightning_megatron.data.packed_rows import IGNORE_INDEX, join_samples
from lightning_megatron.data.packing import Numbers, pack_lengths, row_of
from lightning_megatron.data.sources import corpus_fingerprint
from lightning_megatron.data.tokenizer import Tokenizer
from lightning_megatron.progress import watched_ranges

if TYPE_CHECKING:
    from lightning_megatron.data.sources import Documents


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """Counts of a table's rows: samples, cut and dropped."""

    samples: int
    """Rows that are samples."""
    cut: int
    """Samples that were cut to the longest length."""
    dropped: int
    """Rows with nothing to learn within that length."""

    def __str__(self) -> str:
        return (
            f"{self.samples} samples; {self.cut} of them were cut to sequence_length; {self.dropped} rows were dropped,"
            " because nothing to learn was left within it"
        )


class MarkedSamples(Dataset[dict[str, Tensor]]):
    """Samples for next-token prediction from a file that `write_marked` wrote, held in memory."""

    counts: RowCounts
    """Counts of the rows that they are made of."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with np.load(self.path) as file:
            self._arrays: dict[str, NDArray[Any]] = dict(file)
        self._ends: NDArray[np.int64] = self._arrays["ends"]

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def lengths(self) -> Numbers:
        """Positions of each sample."""
        # The last token of a sample is a label alone.
        return np.diff(self._ends, prepend=0) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`tokens` [s], `labels` [s] (the token after each, -100 outside of answers), `loss_mask` [s]."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        part = row_of(self._ends, index)
        ids = torch.from_numpy(self._arrays["tokens"][part].astype(np.int64))
        is_target = torch.from_numpy(self._arrays["is_marked"][part][1:].copy())
        labels = torch.where(is_target, ids[1:], IGNORE_INDEX)
        return {"tokens": ids[:-1], "labels": labels, "loss_mask": is_target.float()}


class ChatSamples(MarkedSamples):
    """Samples from a file that `prepare_chats` wrote."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        counts = {name: int(self._arrays[name]) for name in ("cut", "dropped")}
        self.counts = RowCounts(samples=len(self), **counts)

    def __reduce__(self) -> tuple[type["ChatSamples"], tuple[Path]]:
        # A loader's workers read the file themselves.
        return ChatSamples, (self.path,)


class PackedChats(Dataset[dict[str, Tensor]]):
    """Rows of `sequence_length` that each hold several samples; which ones depends on their lengths and the seed."""

    def __init__(self, samples: MarkedSamples, sequence_length: int, *, end_of_text: int, seed: int = 0) -> None:
        self.samples = samples
        self.sequence_length = sequence_length
        self.end_of_text = end_of_text
        self.packing = pack_lengths(samples.lengths, sequence_length, seed)

    def __len__(self) -> int:
        return self.packing.num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`tokens`, `labels`, `loss_mask` and `segments`, each [s], as `join_samples` returns them."""
        return self._joined(self._members(index))

    def _members(self, index: int) -> list[dict[str, Tensor]]:
        return [self.samples[int(i)] for i in self.packing.order[self.packing.row(index)]]

    def _joined(self, members: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return join_samples(members, self.sequence_length, self.end_of_text)

    def __str__(self) -> str:
        fill = int(self.samples.lengths.sum()) / (len(self) * self.sequence_length)
        return f"{self.samples.counts}; they lie in {len(self)} rows of {self.sequence_length}, {fill:.1%} full"


def prepare_chats(
    rows: "Documents",
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    sequence_length: int,
    directory: str | Path,
    batch_size: int = 1000,
) -> Path:
    """The `.npz` file in `directory` that holds the samples of a table, written unless it is there.

    Its name is a hash of rows, tokenizer, template and length. Raises ValueError for rows of no known kind, and where
    no row has a label within `sequence_length`.
    """
    if sequence_length < 1:
        raise ValueError(f"sequence_length ({sequence_length}) must be at least 1")
    kind = kind_of_rows(rows.column_names)
    encode = row_encoder(kind, tokenizer, template)
    source = template.source if template is not None else ""
    text = f"{corpus_fingerprint(rows)} {tokenizer.fingerprint} {kind} {sequence_length} {source}"
    path = Path(directory) / f"chats-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz"
    if path.is_file():
        return path
    samples: list[MarkedTokens] = []
    num_cut = num_dropped = 0
    for own in watched_ranges(len(rows), batch_size, what="tokenizing", unit="rows"):
        for encoded in encode([rows[i] for i in own]):
            sample = cut_sample(encoded, sequence_length + 1)
            if not any(sample.is_marked[1:]):
                num_dropped += 1
                continue
            num_cut += len(sample.ids) < len(encoded.ids)
            samples.append(sample)
    if not samples:
        raise ValueError(
            f"none of the {len(rows)} rows has anything to learn within sequence_length ({sequence_length}): no answer "
            "of an assistant, or only after longer prompts; give rows with answers, or a larger sequence_length"
        )
    write_marked(path, samples, cut=num_cut, dropped=num_dropped)
    return path


def cut_sample(sample: MarkedTokens, length: int) -> MarkedTokens:
    """The first tokens of a sample, so many at most."""
    return MarkedTokens(sample.ids[:length], sample.is_marked[:length])


def write_marked(path: Path, samples: Sequence[MarkedTokens], **more: Any) -> None:
    """Writes the samples, and further arrays by name, as a file that MarkedSamples reads."""
    arrays: dict[str, Any] = {
        "tokens": np.concatenate([np.array(sample.ids, dtype=np.int32) for sample in samples]),
        "is_marked": np.concatenate([np.array(sample.is_marked, dtype=np.bool_) for sample in samples]),
        "ends": np.cumsum([len(sample.ids) for sample in samples], dtype=np.int64),
        **more,
    }
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)
