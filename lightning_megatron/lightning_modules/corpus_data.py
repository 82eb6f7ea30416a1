"""`CorpusDataModule`: the base of data modules that cut a corpus of documents into samples.

Between text or token files and the samples of a subclass: sources are read, blended, split into training, validation
and test documents, and tokenized once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, get_args

from torch.utils.data import DataLoader

from lightning_megatron.comm.rng import key
from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.data import (
    BatchRamp,
    Blend,
    BlendedEpochs,
    BlendedSamples,
    Tokenizer,
    load_tokenizer,
    prepare_corpus,
    split_documents,
)
from lightning_megatron.data.collate import Sample
from lightning_megatron.data.corpus_shards import usable_texts
from lightning_megatron.data.document_files import MAX_DOCUMENT_BYTES, BadDocuments
from lightning_megatron.data.prepare import left_out
from lightning_megatron.data.sources import corpus_fingerprint, held_out_of, joined_documents, part_of
from lightning_megatron.lightning_modules.data_module import Samples
from lightning_megatron.lightning_modules.text_data import TextDataConfig, TextDataModule
from lightning_megatron.lightning_modules.text_sources import (
    BlendSource,
    ReadSource,
    blend_faults,
    split_bounds,
    split_faults,
)
from lightning_megatron.trainer.config import ConfigurationError


@config_dataclass
class CorpusDataConfig(TextDataConfig):
    """A corpus of documents: where it comes from, how it is split, and which documents are left out."""

    vocab_size: int
    """Tokens that the model knows; also the size of a tokenizer that is trained here."""
    text_column: str = "text"
    """Column of tables (JSON, CSV, Parquet, Arrow, data sets) that holds the text."""
    blend: list[BlendSource] | None = None
    """Several sources to sample from by weight, in place of path and dataset."""
    epoch_samples: int = 0
    """Samples of an epoch of a blend or of streamed text; 0: a blend ends before a source would repeat itself, a
    stream after the Trainer's max_steps."""
    document_split: str | None = None
    """Proportions of documents for training, validation and test, in that order, such as '969,30,1'."""
    bad_documents: BadDocuments = "skip"
    """Documents that cannot be read or tokenized are left out, counted and named ('skip'), or an error ('refuse')."""
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    """Bytes above which a document counts as bad: tokenizers take some hundred times a document's size in memory."""
    batch_ramp: BatchRamp | None = None
    """Growth of the batch size up to global_batch_size at the start of the run."""


class CorpusDataModule(TextDataModule):
    """Samples that a subclass makes of the tokens of documents (`_token_samples`).

    Blended samples have no end and an order that does not depend on how many are taken; what the sources hold out is
    blended too. A fraction held out of text is spread over the corpus, of token files it is the last documents; where
    there is one document alone, it is a fraction of its samples.
    """

    config: CorpusDataConfig
    needed_of_tokenizer: ClassVar[str] = ""
    """What the samples need of a tokenizer and token files do not hold; empty: nothing."""
    has_ends: ClassVar[bool] = True
    """Whether an end of text follows each document that is tokenized."""
    has_sentences: ClassVar[bool] = False
    """Whether each sentence of a document is a sequence of its own."""

    def __init__(self, config: CorpusDataConfig) -> None:
        super().__init__(config)
        # Samples for test, where they are not those for validation.
        self._tested: Samples | None = None

    @property
    def batch_ramp(self) -> BatchRamp | None:
        """Growth of the batch size up to global_batch_size at the start of the run."""
        return self.config.batch_ramp

    @property
    def _sources(self) -> list[BlendSource]:
        if self.config.blend is not None:
            return self.config.blend
        return [replace(super()._sources[0], text_column=self.config.text_column)]

    @property
    def _validation_source(self) -> BlendSource:
        return replace(super()._validation_source, text_column=self.config.text_column)

    # --- faults -----------------------------------------------------------------------------------------------------

    def faults(self) -> list[str]:
        faults = super().faults()
        if self.config.bad_documents not in get_args(BadDocuments):
            choices = ", ".join(map(repr, get_args(BadDocuments)))
            faults.append(f"bad_documents ({self.config.bad_documents!r}) must be one of {choices}")
        if self.config.max_document_bytes < 1:
            faults.append(f"max_document_bytes ({self.config.max_document_bytes}) must be at least 1")
        return faults

    @property
    def _held_out_options(self) -> dict[str, object]:
        return {**super()._held_out_options, "document_split": self.config.document_split}

    def _training_source_faults(self) -> list[str]:
        config = self.config
        if config.blend is None:
            faults = super()._training_source_faults()
        else:
            faults = blend_faults(config.blend)
            if config.path is not None or config.dataset is not None:
                faults.append("blend is given with path or dataset; give these as one of its sources")
        if config.epoch_samples < 0 or (config.epoch_samples and not self._has_free_epochs):
            faults.append(
                f"epoch_samples ({config.epoch_samples}) must be at least 0, and is for what has no end of its own, as"
                " a blend; of one source all samples are an epoch: leave it out"
            )
        if config.document_split is not None:
            faults += split_faults(config.document_split)
        return faults

    @property
    def _has_free_epochs(self) -> bool:
        """Whether `epoch_samples` may set the length of an epoch."""
        return self.config.blend is not None

    def _tokenizer_faults(self) -> list[str]:
        if self.config.tokenizer is None:
            read = [*self._sources, *([self._validation_source] if self.config.validation_path is not None else [])]
            if len({source.has_tokens for source in read}) > 1:
                return [
                    "token files with text need the tokenizer that they were made with: one that is trained here"
                    " gives other numbers to the same words; give it as tokenizer"
                ]
            if any(source.has_tokens for source in read) and self.needed_of_tokenizer:
                return [
                    f"token files do not say {self.needed_of_tokenizer}; give the tokenizer that they were made with"
                ]
            if not self._has_text:
                return []
        return self._vocabulary_faults(self.config.vocab_size)

    # --- preparing --------------------------------------------------------------------------------------------------

    @property
    def _parts(self) -> dict[str, Samples | None]:
        return {**super()._parts, "test": self._tested}

    def _prepare(self) -> tuple[Samples | None, Samples | None]:
        if self.config.tokenizer is not None:
            self.tokenizer = load_tokenizer(self.config.tokenizer)
            if self._only_predicts:
                return None, None
        sources = [source for source in self._sources if source.weight > 0]
        read = [source.read(self._documents_cache) for source in sources]
        if faults := [fault for one in read for fault in one.token_faults(self.config.vocab_size, self._cache)]:
            raise ConfigurationError(faults)
        if self.tokenizer is None and (texts := [one.documents for one in read if one.corpus is None]):
            documents = joined_documents(texts)
            limit = self.config.max_document_bytes
            usable = usable_texts(documents, limit)
            self.tokenizer = self._trained_tokenizer(
                corpus_fingerprint(documents), usable, self.config.vocab_size, limit
            )
        if self._only_predicts:
            return None, None
        parts = [self._cut(one) for one in read]
        self._tested = self._blended([test for _, _, test in parts])
        if self.config.blend is None:
            [(training, held_out, _)] = parts
        else:
            training = self._blended_training([part for part, _, _ in parts])
            held_out = self._blended([part for _, part, _ in parts])
        return training, held_out if self.config.validation_path is None else self._validation()

    def _validation(self) -> Samples:
        read = self._validation_source.read(self._documents_cache)
        if faults := read.token_faults(self.config.vocab_size, self._cache):
            raise ConfigurationError(faults)
        return self._samples_between(read, 0, read.num_documents)

    def _cut(self, read: ReadSource) -> tuple[Samples, Samples | None, Samples | None]:
        """A source's samples for training, for validation, and for test where these differ."""
        count, fraction = read.num_documents, self._held_out_fraction
        if self.config.document_split is not None:
            return self._split(read, self.config.document_split)
        if self.config.validation_path is not None or fraction == 0:
            return self._samples_between(read, 0, count), None, None
        if count == 1:
            # A single document is split by its samples.
            return *self._samples_between(read, 0, 1).split(fraction), None
        num_held_out = held_out_of(count, fraction)
        about = (
            f"{num_held_out} of {count} documents are held out by validation_fraction ({fraction}; 0 holds out none)"
        )
        with _about(about):
            if read.corpus is None:
                trained, held = split_documents(read.documents, fraction)
                held_out = self._samples(held, self._ready_tokenizer)
            else:
                held_out = self._samples_between(read, count - num_held_out, count)
        if read.corpus is None:
            return self._samples(trained, self._ready_tokenizer), held_out, None
        return self._samples_between(read, 0, count - num_held_out), held_out, None

    def _split(self, read: ReadSource, split: str) -> tuple[Samples, Samples | None, Samples | None]:
        """A source's samples for training, validation and test in the proportions of `document_split`."""
        count = read.num_documents
        ends = split_bounds(split, count)
        parts: list[Samples | None] = []
        for what, first, last in zip(("training", "validation", "test"), [0, *ends], ends, strict=False):
            with _about(f"{last - first} of {count} documents are for {what} by document_split ({split!r})"):
                parts.append(self._samples_between(read, first, last) if last > first else None)
        training, held_out, tested = parts
        if training is None:
            raise ValueError(f"document_split ({split}) leaves none of {count} documents to train on")
        return training, held_out, tested

    def _samples_between(self, read: ReadSource, first: int, last: int) -> Samples:
        """The samples of the documents from `first` to before `last`."""
        if read.corpus is not None:
            return self._token_samples(Path(read.corpus.prefix), (first, last), self.tokenizer)
        is_all = (first, last) == (0, read.num_documents)
        documents = read.documents if is_all else part_of(read.documents, range(first, last))
        return self._samples(documents, self._ready_tokenizer)

    def _samples(self, documents: Any, tokenizer: Tokenizer) -> Samples:
        """The samples that documents make; makes what is not in the cache yet."""
        prefix = prepare_corpus(
            documents,
            tokenizer,
            self.config.cache_directory,
            has_ends=self.has_ends,
            sentences=self.has_sentences,
            max_document_bytes=self.config.max_document_bytes,
            bad_documents=self.config.bad_documents,
        )
        samples = self._token_samples(prefix, None, tokenizer)
        return replace(samples, summary="; ".join(filter(None, (samples.summary, left_out(prefix)))))

    def _token_samples(self, prefix: Path, documents: tuple[int, int] | None, tokenizer: Tokenizer | None) -> Samples:
        """The samples of token files: of all documents, or of those from the first to before the second number."""
        raise NotImplementedError

    # --- blending ---------------------------------------------------------------------------------------------------

    @property
    def _weights(self) -> list[float]:
        return [source.weight for source in self._sources if source.weight > 0]

    def _blended_training(self, parts: list[Samples]) -> Samples:
        """Samples of all sources by weight, each source repeated without an end."""
        sources = [part.epochs(seed=key(self.config.seed, "source", number)) for number, part in enumerate(parts)]
        blended = BlendedEpochs(sources, self._weights)
        counts = [part.count for part in parts]
        count = self.config.epoch_samples or max(blended.blend.most_samples(counts), 1)
        names = [str(source) for source in self._sources if source.weight > 0]
        shares = ", ".join(
            f"{share:.1%} of {name} ({size} samples{f'; {part.summary}' if part.summary else ''})"
            for share, name, size, part in zip(blended.blend.shares, names, counts, parts, strict=True)
        )
        return Samples(dataset=blended, count=count, summary=f"{shares}; an epoch is {count} samples", is_infinite=True)

    def _blended(self, parts: list[Samples | None]) -> Samples | None:
        """As many samples of all sources by weight as there are without taking one twice; None without any."""
        found = [part for part in parts if part is not None]
        if not found:
            return None
        if len(found) < len(parts):
            names = [str(source) for source in self._sources if source.weight > 0]
            without = [name for name, part in zip(names, parts, strict=True) if part is None]
            raise ValueError(
                f"of the blend {', '.join(without)} has too little to hold anything out, and the others have not; give"
                " it more documents, hold nothing out by validation_fraction=0, or give validation_path"
            )
        if len(found) == 1:
            return found[0]
        counts = [part.count for part in found]
        count = Blend(self._weights).most_samples(counts)
        if count == 0:
            raise ValueError(f"what the sources of the blend hold out ({counts} samples) is too little to be blended")
        sized = [part.part(0, part.count).dataset for part in found]
        summary = "; ".join(filter(None, (part.summary for part in found)))
        blended = BlendedSamples(sized, self._weights, count)
        return Samples(dataset=blended, count=count, summary=summary, is_ordered=True)

    def test_dataloader(self) -> list[DataLoader[Sample]]:
        """Loaders of the documents that `document_split` reserves for test, else of those for validation."""
        return self._evaluation_loaders(self._tested) if self._tested is not None else self.val_dataloader()


@contextmanager
def _about(what: str) -> Iterator[None]:
    """Prefixes a ValueError with the documents that it is about."""
    try:
        yield
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
