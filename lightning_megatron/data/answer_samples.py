"""Fine-tuning samples for an encoder and a decoder: one reads the question, the other learns the answer.

    prompt, answer    "two and two?"  "four."
    encoder_tokens    two and two ? end
    decoder_tokens    start four .
    labels            four . end

Tokens of all rows are in one file, made once by one process. Each answer of a row is a sample, whose prompt is all that
comes before it. An answer is cut to `decoder_length`; a sample whose prompt does not fit the encoder, or which has no
answer, is dropped. Both are counted. `PackedAnswers` puts several samples in one row of each stack.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron.data.atomic_file import atomic_write
from lightning_megatron.data.chat import kind_of_rows, questions_of
from lightning_megatron.data.chat_template import ChatTemplate
from lightning_megatron.data.packed_rows import IGNORE_INDEX, join_entries
from lightning_megatron.data.packing import Numbers, pack_pairs
from lightning_megatron.data.sources import corpus_fingerprint
from lightning_megatron.data.tokenizer import Tokenizer
from lightning_megatron.progress import watched_ranges

if TYPE_CHECKING:
    from lightning_megatron.data.sources import Documents

# Rows that are tokenized together.
_ROWS = 1000


@dataclass(frozen=True, kw_only=True)
class AnswerCounts:
    """Counts of a table's answers: samples, cut and dropped."""

    samples: int
    """Answers that are samples."""
    cut: int
    """Samples whose answer was cut to the decoder's length."""
    dropped: int
    """Answers that are empty, or whose question is longer than the encoder's length."""

    def __str__(self) -> str:
        return (
            f"{self.samples} samples; {self.cut} answers were cut to decoder_sequence_length; {self.dropped} were"
            " dropped, because they are empty or sequence_length has no room for what is asked"
        )


class AnswerSamples(Dataset[dict[str, Tensor]]):
    """Samples from a file that `prepare_answers` wrote, held in memory. `start_token` is the decoder's first."""

    def __init__(self, path: str | Path, *, start_token: int) -> None:
        self.path, self.start_token = Path(path), start_token
        with np.load(self.path) as file:
            self._tokens: NDArray[np.int32] = file["tokens"]
            # Ends of each question and of the answer after it: [samples, 2].
            self._ends: NDArray[np.int64] = file["ends"]
            self.counts = AnswerCounts(samples=len(self._ends), cut=int(file["cut"]), dropped=int(file["dropped"]))

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def lengths_N2(self) -> Numbers:
        """Tokens of each sample's encoder text and decoder text: [samples, 2]."""
        return np.diff(self._ends.reshape(-1), prepend=0).reshape(-1, 2)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`encoder_tokens` and `encoder_segments` [s]; `decoder_tokens`, `decoder_segments`, `labels` and `loss_mask`
        [t]. Segments are 0; the padding of a batch belongs to no segment."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first = int(self._ends[index - 1, 1]) if index else 0
        prompt, answer = np.split(self._tokens[first : self._ends[index, 1]].astype(np.int64), [self._num_read(index)])
        labels = torch.from_numpy(answer)
        return {
            "encoder_tokens": torch.from_numpy(prompt),
            "encoder_segments": torch.zeros(len(prompt), dtype=torch.int64),
            "decoder_tokens": torch.cat([torch.tensor([self.start_token]), labels[:-1]]),
            "decoder_segments": torch.zeros_like(labels),
            "labels": labels,
            "loss_mask": torch.ones(len(labels)),
        }

    def _num_read(self, index: int) -> int:
        """Number of tokens of the prompt, which the encoder reads."""
        return int(self._ends[index, 0]) - (int(self._ends[index - 1, 1]) if index else 0)

    def __reduce__(self) -> tuple[Callable[..., "AnswerSamples"], tuple[Path]]:
        # A loader's workers read the file themselves.
        return partial(AnswerSamples, start_token=self.start_token), (self.path,)


class PackedAnswers(Dataset[dict[str, Tensor]]):
    """Pairs of rows, of the encoder's and the decoder's length, that hold several samples; which ones depends on their
    lengths and the seed. `padding` is the token at the unused ends."""

    def __init__(
        self, samples: AnswerSamples, *, encoder_length: int, decoder_length: int, padding: int, seed: int = 0
    ) -> None:
        self.samples = samples
        self.encoder_length = encoder_length
        self.decoder_length = decoder_length
        self.padding = padding
        self.packing = pack_pairs(samples.lengths_N2, (encoder_length, decoder_length), seed)

    def __len__(self) -> int:
        return self.packing.num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """The entries of AnswerSamples; both segments of a sample are its number within the row."""
        members = [self.samples[int(i)] for i in self.packing.order[self.packing.row(index)]]
        return {
            **join_entries(
                members, self.encoder_length, fills={"encoder_tokens": self.padding}, segments="encoder_segments"
            ),
            **join_entries(
                members,
                self.decoder_length,
                fills={"decoder_tokens": self.padding, "labels": IGNORE_INDEX, "loss_mask": 0},
                segments="decoder_segments",
            ),
        }

    def __str__(self) -> str:
        read, learnt = self.samples.lengths_N2.sum(axis=0) / len(self)
        return (
            f"{self.samples.counts}; they lie in {len(self)} rows of {self.encoder_length} and {self.decoder_length},"
            f" {read / self.encoder_length:.1%} and {learnt / self.decoder_length:.1%} full"
        )


def prepare_answers(
    rows: "Documents",
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    encoder_length: int,
    decoder_length: int,
    directory: str | Path,
) -> Path:
    """The `.npz` file in `directory` that holds the samples of a table, written unless it is there.

    Both texts of a sample end with the end of text. The name of the file says rows, tokenizer, template and lengths.
    Raises ValueError for rows that ask nothing, and where no answer is left.
    """
    kind = kind_of_rows(rows.column_names)
    source = template.source if template is not None else ""
    key = f"{corpus_fingerprint(rows)} {tokenizer.fingerprint} {kind} {encoder_length} {decoder_length} {source}"
    path = Path(directory) / f"answers-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
    if path.is_file():
        return path
    samples: list[tuple[list[int], list[int]]] = []
    num_cut = num_dropped = 0
    for own in watched_ranges(len(rows), _ROWS, what="tokenizing", unit="rows"):
        batch = [rows[i] for i in own]
        questions = [question for row in batch for question in questions_of(kind, row, template)]
        prompts = _ended([question.prompt for question in questions], tokenizer)
        for read, answer in zip(prompts, _ended([question.answer for question in questions], tokenizer), strict=True):
            if len(read) > encoder_length or answer == [tokenizer.end_of_text]:
                num_dropped += 1
                continue
            num_cut += len(answer) > decoder_length
            samples.append((read, answer[:decoder_length]))
    if not samples:
        raise ValueError(
            f"none of the {len(rows)} rows has an answer to something that sequence_length ({encoder_length}) has room"
            " for; give rows with answers, or a larger sequence_length"
        )
    lengths = np.array([len(part) for sample in samples for part in sample], dtype=np.int64)
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        np.savez(
            file,
            tokens=np.concatenate([np.array(part, dtype=np.int32) for sample in samples for part in sample]),
            ends=np.cumsum(lengths).reshape(-1, 2),
            cut=num_cut,
            dropped=num_dropped,
        )
    return path


def _ended(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of each text with one end of text after it; special tokens that are spelled out are such."""
    end = [tokenizer.end_of_text]
    return [ids if ids[-1:] == end else ids + end for ids, _ in tokenizer.encode_spelled(texts)]
