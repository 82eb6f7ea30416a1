"""Samples for preference tuning: a row's chosen answer and its rejected one, each behind all that is asked.

    columns                                                   labels
    prompt, chosen, rejected (text)                           the answer and the end of text
    chosen, rejected (conversations: role, content), and in   the last answer of each, after the chat template
    front of both a prompt, where that is messages too

`reference_chosen` and `reference_rejected` beside them are log-probabilities of the answers under a reference model. An
answer is no longer than `sequence_length` leaves it; the rest is cut off and counted, and a row of which an answer has
nothing left is dropped and counted.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron.data.chat import MarkedTokens, chat_spans, marked_tokens, messages_of, row_encoder
from lightning_megatron.data.chat_samples import MarkedSamples, RowCounts, cut_sample, write_marked
from lightning_megatron.data.chat_template import ChatTemplate
from lightning_megatron.data.sources import corpus_fingerprint
from lightning_megatron.data.tokenizer import Tokenizer
from lightning_megatron.progress import watched_ranges

if TYPE_CHECKING:
    from lightning_megatron.data.sources import Documents

ANSWERS = ("chosen", "rejected")
"""Columns of the two answers."""
REFERENCES = ("reference_chosen", "reference_rejected")
"""Columns of their log-probabilities under a reference model."""
# Rows that are tokenized together.
_ROWS = 1000


class PreferenceSamples(Dataset[dict[str, Tensor]]):
    """Samples from a file that `prepare_preferences` wrote, held in memory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._answers = MarkedSamples(path)
        with np.load(self.path) as file:
            self._references = torch.from_numpy(file["references"])
            self.rows = torch.from_numpy(file["rows"])
            """The number of each sample's row in the table [samples]."""
            counts = {name: int(file[name]) for name in ("cut", "dropped")}
        self.counts = RowCounts(samples=len(self), **counts)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def has_references(self) -> bool:
        """Whether the table has log-probabilities of a reference model."""
        return len(self._references) > 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """A sample has the tokens and labels [s] of each answer (`chosen_tokens`, `chosen_labels` and so on), its `row`
        and `loss_mask` [], and the `references` [2] where the table has them."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        sample = {"row": self.rows[index], "loss_mask": torch.tensor(1.0)}
        for place, name in enumerate(ANSWERS):
            answer = self._answers[2 * index + place]
            sample |= {f"{name}_tokens": answer["tokens"], f"{name}_labels": answer["labels"]}
        return sample | ({"references": self._references[index]} if len(self._references) else {})

    def __reduce__(self) -> tuple[type["PreferenceSamples"], tuple[Path]]:
        # A loader's workers read the file themselves.
        return PreferenceSamples, (self.path,)


def prepare_preferences(
    rows: "Documents",
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    sequence_length: int,
    directory: str | Path,
) -> Path:
    """The `.npz` file in `directory` that holds the samples of a table, written unless it is there.

    Its name is a hash of rows, tokenizer, template and length. Raises ValueError for rows that are no preferences, and
    where no row is left.
    """
    columns = rows.column_names
    has_references = set(REFERENCES) <= set(columns)
    if not set(ANSWERS) <= set(columns):
        raise ValueError(
            f"the rows have the columns {', '.join(map(repr, columns))}; preference tuning needs 'chosen' and "
            "'rejected' (texts after a 'prompt', or conversations); rename the columns of the file"
        )
    source = template.source if template is not None else ""
    text = f"{corpus_fingerprint(rows)} {tokenizer.fingerprint} {sequence_length} {source} {has_references}"
    path = Path(directory) / f"preferences-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz"
    if path.is_file():
        return path
    samples: list[MarkedTokens] = []
    kept: list[int] = []
    num_cut = 0
    for own in watched_ranges(len(rows), _ROWS, what="tokenizing", unit="rows"):
        batch = [rows[i] for i in own]
        answers = [_encoded(batch, name, tokenizer, template) for name in ANSWERS]
        for number, pair in enumerate(zip(*answers, strict=True), own.start):
            cut = [cut_sample(answer, sequence_length + 1) for answer in pair]
            if all(any(answer.is_marked[1:]) for answer in cut):
                num_cut += any(len(one.ids) < len(whole.ids) for one, whole in zip(cut, pair, strict=True))
                kept.append(number)
                samples += cut
    if not samples:
        raise ValueError(
            f"none of the {len(rows)} rows has two answers that begin within sequence_length ({sequence_length}); give "
            "rows with answers, or a larger sequence_length"
        )
    references = [[float(rows[i][name]) for name in REFERENCES] for i in kept] if has_references else []
    write_marked(
        path,
        samples,
        rows=np.array(kept, dtype=np.int64),
        references=np.array(references, dtype=np.float64),
        cut=num_cut,
        dropped=len(rows) - len(kept),
    )
    return path


def _encoded(
    rows: Sequence[Mapping[str, Any]], name: str, tokenizer: Tokenizer, template: ChatTemplate | None
) -> list[MarkedTokens]:
    """The rows with the answer in that column, which is marked."""
    if isinstance(rows[0][name], str):
        completions = [{"prompt": row.get("prompt") or "", "completion": row[name]} for row in rows]
        return row_encoder("completion", tokenizer, template)(completions)
    texts = []
    for row in rows:
        messages, known = messages_of(row, name, template)
        # Text beside conversations repeats what they begin with.
        if isinstance(row.get("prompt"), list):
            messages = [*messages_of(row, "prompt", template)[0], *messages]
        if all(message["role"] == "assistant" for message in messages):
            raise ValueError(
                f"{name!r} must have a message in front of its answer, and a row has {messages!r} alone; put what is "
                "asked in front of it, or under 'prompt' as a list of messages"
            )
        text, spans = chat_spans(messages, known)
        # What both conversations share is no answer to prefer.
        texts.append((text, spans[-1:]))
    return marked_tokens(texts, tokenizer)
