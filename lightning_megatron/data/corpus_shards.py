"""Shards of a corpus as token files, and counts of their documents.

Under `prepare.py`. Document i of the token files is document i of the corpus, whatever it holds: one without a token
is a document without a sequence, as Megatron's own tool writes it.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_megatron.data.atomic_file import atomic_write
from lightning_megatron.data.document_files import MAX_DOCUMENT_BYTES, BadDocuments
from lightning_megatron.data.megatron_files import megatron_writer, token_dtype
from lightning_megatron.data.sentences import split_sentences
from lightning_megatron.data.sources import HeldDocument, document_places, held_documents
from lightning_megatron.data.tokenizer import Tokenizer
from lightning_megatron.text_files import read_json

if TYPE_CHECKING:
    from lightning_megatron.data.sources import Documents

_BATCH_BYTES = 1 << 22
"""Bytes of text that are tokenized together."""

_BATCH_DOCUMENTS = 1000

_NAMED = 5
"""Number of bad documents that are named."""


@dataclass(frozen=True, kw_only=True)
class DocumentForm:
    """Form of a written document."""

    has_ends: bool = True
    """Whether an end of text follows each document."""
    sentences: bool = False
    """Whether each sentence of a document is a sequence."""
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    """Bytes above which a document is bad, like one that cannot be read or that the tokenizer refuses."""
    bad_documents: BadDocuments = "skip"


@dataclass(kw_only=True)
class Counts:
    """Counts of written documents."""

    num_documents: int = 0
    num_bytes: int = 0
    """Bytes of text that was tokenized."""
    num_tokens: int = 0
    num_empty: int = 0
    """Documents that are empty and not bad."""
    num_bad: int = 0
    bad: "list[BadDocument]" = field(default_factory=list)
    """The first bad documents."""

    def numbers(self) -> list[int]:
        """All counts, without the names of bad documents."""
        return [getattr(self, name) for name in _NUMBERS]

    @staticmethod
    def of_numbers(numbers: Sequence[int]) -> "Counts":
        counts = Counts()
        for name, number in zip(_NUMBERS, numbers, strict=True):
            setattr(counts, name, number)
        return counts

    def add(self, other: "Counts") -> None:
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.bad = (self.bad + other.bad)[:_NAMED]

    def left_out(self) -> str:
        """One line about documents without tokens; empty where there are none."""
        lines = []
        if self.num_bad:
            more = "; ..." if self.num_bad > len(self.bad) else ""
            lines.append(f"{self.num_bad:,} documents were left without tokens: {'; '.join(map(str, self.bad))}{more}")
        if self.num_empty:
            lines.append(f"{self.num_empty:,} documents are empty")
        return "; ".join(lines)


_NUMBERS = ("num_documents", "num_bytes", "num_tokens", "num_empty", "num_bad")


@dataclass(frozen=True, kw_only=True)
class BadDocument:
    """A document that is not to be tokenized."""

    why: str
    """The reason, to be read after "document 5"."""
    number: int = -1
    """Number of the document in the corpus; -1 for a text alone."""
    is_placed: bool = False
    """Whether `why` names the document's location."""

    def __str__(self) -> str:
        return f"document {self.number} {self.why}"


def encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int] | BadDocument]:
    """The tokens of each text, or why the tokenizer refuses it."""
    try:
        return list(tokenizer.encode(texts))
    except ValueError as error:
        if len(texts) == 1:
            return [BadDocument(why=f"is refused by the tokenizer: {error}")]
        return [ids for text in texts for ids in encoded(tokenizer, [text])]


class ShardWriter:
    """Writes shards of a corpus, each complete or not at all."""

    def __init__(self, documents: "Documents", tokenizer: Tokenizer, form: DocumentForm) -> None:
        self.documents = documents
        self.tokenizer = tokenizer
        self.form = form
        self.dtype = token_dtype(tokenizer.vocab_size)

    def write(self, prefix: Path, first: int, last: int, on_batch: Callable[[Counts], None]) -> None:
        """The token files of documents `first` to before `last`, and then `PREFIX.json`, the counts.

        Calls `on_batch` with the counts of each batch. Raises ValueError for a bad document that is to be refused.
        """
        total = Counts()
        with megatron_writer(prefix, self.dtype) as writer:
            for batch, num_bytes in self._batches(first, last):
                counts = Counts(num_documents=len(batch), num_bytes=num_bytes)
                for number, tokens in enumerate(self._tokenized(batch), start=first + total.num_documents):
                    writer.add_document([] if isinstance(tokens, BadDocument) else tokens)
                    if isinstance(tokens, BadDocument):
                        counts.num_bad += 1
                        counts.bad.append(replace(tokens, number=number))
                    else:
                        counts.num_empty += not tokens
                        counts.num_tokens += sum(map(len, tokens))
                if counts.bad and self.form.bad_documents == "refuse":
                    named = placed(counts.bad[:_NAMED], self.documents)
                    raise ValueError(f"{'; '.join(map(str, named))}; take such out, or skip them (bad_documents)")
                total.add(counts)
                on_batch(counts)
        write_counts(prefix, total)

    def _batches(self, first: int, last: int) -> Iterator[tuple[list[str | BadDocument], int]]:
        """Batches of documents, and the bytes of those that are not bad."""
        batch: list[str | BadDocument] = []
        num_bytes = 0
        for held in held_documents(self.documents, first, last):
            text = self._read(held)
            batch.append(text)
            num_bytes += len(held.content) if held.content is not None and isinstance(text, str) else 0
            if num_bytes >= _BATCH_BYTES or len(batch) == _BATCH_DOCUMENTS:
                yield batch, num_bytes
                batch, num_bytes = [], 0
        if batch:
            yield batch, num_bytes

    def _read(self, held: HeldDocument) -> str | BadDocument:
        if held.fault:
            return BadDocument(why=held.fault, is_placed=True)
        if held.content is None:
            return ""
        if (size := len(held.content)) > self.form.max_document_bytes:
            return BadDocument(why=f"has {size} bytes, above max_document_bytes ({self.form.max_document_bytes})")
        try:
            return str(held.content, "utf-8")
        except UnicodeDecodeError as error:
            return BadDocument(why=f"is not UTF-8 at byte {error.start}")

    def _tokenized(self, batch: list[str | BadDocument]) -> list[list[list[int]] | BadDocument]:
        """The tokens of each document's sequences, those without any left out."""
        texts = [self._sequences(text) if isinstance(text, str) else [] for text in batch]
        try:
            ids = iter(self.tokenizer.encode([text for sequences in texts for text in sequences]))
        except ValueError as error:
            if len(batch) == 1:
                return [BadDocument(why=f"is refused by the tokenizer: {error}")]
            return [tokens for document in batch for tokens in self._tokenized([document])]
        return [
            text if isinstance(text, BadDocument) else self._ended([found for _ in sequences if (found := next(ids))])
            for text, sequences in zip(batch, texts, strict=True)
        ]

    def _sequences(self, text: str) -> list[str]:
        return split_sentences(text) if self.form.sentences else [text]

    def _ended(self, sequences: list[list[int]]) -> list[list[int]]:
        if sequences and self.form.has_ends:
            sequences[-1].append(self.tokenizer.end_of_text)
        return sequences


def placed(bad: "Sequence[BadDocument]", documents: "Documents") -> "list[BadDocument]":
    """The bad documents with their locations, as far as the source knows them."""
    missing = [one.number for one in bad if not one.is_placed]
    places = dict(zip(missing, document_places(documents, missing), strict=True)) if missing else {}
    return [
        replace(one, why=f"{one.why} ({place})", is_placed=True) if (place := places.get(one.number)) else one
        for one in bad
    ]


def counts_path(prefix: Path) -> Path:
    """The file of a shard's counts, which exists once the shard is complete."""
    return Path(f"{prefix}.json")


def read_counts(prefix: Path) -> Counts:
    """The counts of a complete shard."""
    written = read_json(counts_path(prefix))
    return Counts(**{**written, "bad": [BadDocument(**one) for one in written["bad"]]})


def write_counts(prefix: Path, counts: Counts) -> None:
    """Writes a shard's counts where `read_counts` finds them."""
    with atomic_write(counts_path(prefix)) as temporary:
        temporary.write_text(json.dumps(asdict(counts)), encoding="utf-8")


def usable_texts(documents: "Documents", max_document_bytes: int = MAX_DOCUMENT_BYTES) -> Iterator[str]:
    """The texts to train a tokenizer on: documents that are neither null, nor too large, nor anything but UTF-8."""
    for held in held_documents(documents, 0, len(documents)):
        if held.content is not None and len(held.content) <= max_document_bytes:
            try:
                yield str(held.content, "utf-8")
            except UnicodeDecodeError:
                continue
