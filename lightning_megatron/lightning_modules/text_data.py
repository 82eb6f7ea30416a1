"""`TextDataModule`: what ready data modules of text share, from documents and a tokenizer to samples of a subclass."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
from torch.utils.data import DataLoader

from lightning_megatron.comm.rng import key
from lightning_megatron.data import (
    BatchRamp,
    Blend,
    BlendedEpochs,
    BlendedSamples,
    Tokenizer,
    load_tokenizer,
    prepare_corpus,
    split_documents,
    train_tokenizer,
)
from lightning_megatron.data.corpus_shards import usable_texts
from lightning_megatron.data.document_files import MAX_DOCUMENT_BYTES, BadDocuments
from lightning_megatron.data.prepare import left_out
from lightning_megatron.data.sources import corpus_fingerprint, held_out_of, joined_documents, part_of
from lightning_megatron.data.tokenizer import SMALLEST_VOCABULARY
from lightning_megatron.lightning_modules.data_module import ParallelDataModule, Samples, as_configuration_error
from lightning_megatron.lightning_modules.loaders import Sample, prompt_loader
from lightning_megatron.lightning_modules.text_sources import (
    BlendSource,
    ReadSource,
    blend_faults,
    split_bounds,
    split_faults,
)
from lightning_megatron.trainer.config import ConfigurationError


class TextDataModule(ParallelDataModule):
    """Samples of text, which a subclass makes of the tokens of documents (`_token_samples`).

    Text comes from `path` (a file, a directory or a pattern), from `dataset` (a name that `datasets` knows, or a local
    one), or, where neither is given, from the source files of Python's standard library. A `path` may be the prefix of
    Megatron's token files too, whose text is tokens already. Without `tokenizer` (a tokenizer.json, or a directory with
    one) a byte-level one of `vocab_size` tokens is trained on the text; token files alone need none to train.

    With `blend` samples come from several sources by weight. They have no end and an order that does not depend on how
    many are taken; an epoch is `epoch_samples` of them, or as many as come before a source would begin again.

    `validation_fraction` of the documents (of the samples, where there is one document) is held out for validation and
    test, 0.02 of them where nothing is said: of text spread over the corpus, of token files the last ones. In its place
    there are `validation_path`, which is read besides, and `document_split`, such as "969,30,1": the first documents
    for training, those behind them for validation, and the last for test. What blended sources hold out is blended too.

    Documents that cannot be read or tokenized, and those of more than `max_document_bytes`, are left out, counted and
    named, or with `bad_documents="refuse"` a fault.

    `prompts` are the texts that prediction goes on with, `global_batch_size` at a time. What is prepared lies in
    `cache_directory`, under names that say corpus and tokenizer.
    """

    special_tokens: ClassVar[tuple[str, ...]] = ()
    """Of a tokenizer that is trained here, beside the end of text."""
    default_fraction: ClassVar[float] = 0.02
    """Held out where nothing says what is."""
    needed_of_tokenizer: ClassVar[str] = ""
    """What only a tokenizer says, without which token files are of no use; empty: there is nothing."""
    has_ends: ClassVar[bool] = True
    """Whether an end of text follows each document that is tokenized."""
    has_sentences: ClassVar[bool] = False
    """Whether each of its sentences is a sequence."""

    def __init__(
        self,
        *,
        vocab_size: int,
        sequence_length: int,
        global_batch_size: int,
        path: str | None = None,
        dataset: str | None = None,
        text_column: str = "text",
        blend: list[BlendSource] | None = None,
        epoch_samples: int = 0,
        tokenizer: str | None = None,
        validation_fraction: float | None = None,
        validation_path: str | None = None,
        document_split: str | None = None,
        bad_documents: BadDocuments = "skip",
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
        batch_ramp: BatchRamp | None = None,
        prompts: list[str] | None = None,
        num_workers: int = 0,
        seed: int = 0,
        cache_directory: str = "runs/data",
    ) -> None:
        super().__init__(global_batch_size=global_batch_size, num_workers=num_workers, seed=seed, batch_ramp=batch_ramp)
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.path = path
        self.dataset = dataset
        self.text_column = text_column
        self.blend = blend
        self.epoch_samples = epoch_samples
        self.validation_path = validation_path
        self.document_split = document_split
        self.tokenizer_path = tokenizer
        self.validation_fraction = validation_fraction
        self.bad_documents: BadDocuments = bad_documents
        self.max_document_bytes = max_document_bytes
        self.prompts = prompts or []
        self.cache_directory = Path(cache_directory)
        # There from `setup` on, but for token files alone.
        self.tokenizer: Tokenizer | None = None
        # For test, where there are others than for validation.
        self._tested: Samples | None = None

    @property
    def _sources(self) -> list[BlendSource]:
        if self.blend is not None:
            return self.blend
        return [BlendSource(weight=1.0, path=self.path, dataset=self.dataset, text_column=self.text_column)]

    @property
    def _validation_source(self) -> BlendSource:
        return BlendSource(weight=1.0, path=self.validation_path, text_column=self.text_column)

    @property
    def _has_text(self) -> bool:
        """Whether any of the sources is to be tokenized."""
        return not all(source.has_tokens for source in self._sources)

    def faults(self) -> list[str]:
        faults = super().faults() + self.sample_faults()
        if not 0 <= self._held_out_fraction < 1:
            faults.append(f"validation_fraction ({self.validation_fraction}) must be at least 0 and below 1")
        if self.bad_documents not in get_args(BadDocuments):
            choices = ", ".join(map(repr, get_args(BadDocuments)))
            faults.append(f"bad_documents ({self.bad_documents!r}) must be one of {choices}")
        if self.max_document_bytes < 1:
            faults.append(f"max_document_bytes ({self.max_document_bytes}) must be at least 1")
        return faults + self._source_faults() + self._tokenizer_faults()

    def sample_faults(self) -> list[str]:
        """What samples cannot be, whatever text they are made of; plans ask for it too."""
        if self.sequence_length < 1:
            return [f"sequence_length ({self.sequence_length}) must be at least 1"]
        return []

    @property
    def _held_out_fraction(self) -> float:
        return self.default_fraction if self.validation_fraction is None else self.validation_fraction

    def _source_faults(self) -> list[str]:
        if self.blend is None:
            faults = self._sources[0].faults()
        else:
            faults = blend_faults(self.blend)
            if self.path is not None or self.dataset is not None:
                faults.append("blend is given beside path or dataset; give these as one of its sources")
        if self.epoch_samples < 0 or (self.epoch_samples and not self._has_free_epochs):
            faults.append(
                f"epoch_samples ({self.epoch_samples}) must be at least 0, and is for what has no end of its own, as a"
                " blend; of one source all samples are an epoch: leave it out"
            )
        if self.validation_path is not None:
            faults += [f"validation_path: {fault}" for fault in self._validation_source.faults()]
        if self.document_split is not None:
            faults += split_faults(self.document_split)
        given = [
            f"{name} ({value!r})"
            for name in ("validation_fraction", "validation_path", "document_split")
            # A fraction of 0 holds out none.
            if (value := getattr(self, name))
        ]
        if len(given) > 1:
            faults.append(f"{' and '.join(given)} all say what is held out; give one of them")
        return faults

    @property
    def _has_free_epochs(self) -> bool:
        return self.blend is not None

    def _tokenizer_faults(self) -> list[str]:
        if self.tokenizer_path is None:
            read = [*self._sources, *([self._validation_source] if self.validation_path is not None else [])]
            if len({source.has_tokens for source in read}) > 1:
                return [
                    "token files beside text need the tokenizer that they were made with: one that is trained here"
                    " gives other numbers to the same words; give it as tokenizer"
                ]
            if any(source.has_tokens for source in read) and self.needed_of_tokenizer:
                return [
                    f"token files do not say {self.needed_of_tokenizer}; give the tokenizer that they were made with"
                ]
            if not self._has_text:
                return []
            smallest = SMALLEST_VOCABULARY + len(self.special_tokens)
            if self.vocab_size >= smallest:
                return []
            others = f" and {len(self.special_tokens)} special tokens" if self.special_tokens else ""
            return [
                f"vocab_size ({self.vocab_size}) must be at least {smallest} for a tokenizer to be trained: "
                f"the 256 bytes, the end of text{others}; raise it, or give a tokenizer"
            ]
        try:
            needed = load_tokenizer(self.tokenizer_path).vocab_size
        except ValueError as error:
            return [str(error)]
        if needed <= self.vocab_size:
            return []
        return [
            f"vocab_size ({self.vocab_size}) must be at least that of the tokenizer ({self.tokenizer_path}), {needed}"
        ]

    def setup(self, stage: str) -> None:
        if stage == "predict" and not self.prompts:
            raise ConfigurationError(
                [
                    "there are no prompts to predict from; give some, as --data.prompts '[\"Who are you?\"]' or "
                    f'{type(self).__name__}(prompts=["Who are you?"])'
                ]
            )
        if stage == "predict" and self.tokenizer_path is None and not self._has_text:
            raise ConfigurationError(["token files alone say no text of a token; give the tokenizer to predict"])
        super().setup(stage)
        if stage == "predict":
            # What is wrong with them is told before a model is there.
            with as_configuration_error():
                self._prompt_ids()

    @property
    def _parts(self) -> dict[str, Samples | None]:
        return {**super()._parts, "test": self._tested}

    def _prepare(self) -> tuple[Samples | None, Samples | None]:
        if self.tokenizer_path is not None:
            self.tokenizer = load_tokenizer(self.tokenizer_path)
            if self._only_predicts:
                return None, None
        sources = [source for source in self._sources if source.weight > 0]
        read = [source.read(self._documents_cache) for source in sources]
        if faults := [fault for one in read for fault in one.token_faults(self.vocab_size, self.cache_directory)]:
            raise ConfigurationError(faults)
        if self.tokenizer is None and (texts := [one.documents for one in read if one.corpus is None]):
            documents = joined_documents(texts)
            usable = usable_texts(documents, self.max_document_bytes)
            self.tokenizer = self._tokenizer_for(corpus_fingerprint(documents), usable)
        if self._only_predicts:
            return None, None
        parts = [self._cut(one) for one in read]
        self._tested = self._blended([test for _, _, test in parts])
        if self.blend is None:
            [(training, held_out, _)] = parts
        else:
            training = self._blended_training([part for part, _, _ in parts])
            held_out = self._blended([part for _, part, _ in parts])
        return training, held_out if self.validation_path is None else self._validation()

    def _validation(self) -> Samples:
        assert self.validation_path is not None
        read = self._validation_source.read(self._documents_cache)
        if faults := read.token_faults(self.vocab_size, self.cache_directory):
            raise ConfigurationError(faults)
        return self._samples_between(read, 0, read.num_documents)

    def _cut(self, read: ReadSource) -> tuple[Samples, Samples | None, Samples | None]:
        """What of a source is for training, for validation and for test alone."""
        count, fraction = read.num_documents, self._held_out_fraction
        if self.document_split is not None:
            return self._split(read, self.document_split)
        if self.validation_path is not None or fraction == 0:
            return self._samples_between(read, 0, count), None, None
        if count == 1:
            # One document alone cannot be held out.
            return *self._samples_between(read, 0, 1).cut(fraction), None
        num_held_out = held_out_of(count, fraction)
        about = (
            f"{num_held_out} of {count} documents are held out by validation_fraction ({fraction}; 0 holds out none)"
        )
        with _about(about):
            if read.corpus is None:
                kept, held = split_documents(read.documents, fraction)
                held_out = self._text_samples(held)
            else:
                held_out = self._samples_between(read, count - num_held_out, count)
        if read.corpus is None:
            return self._text_samples(kept), held_out, None
        return self._samples_between(read, 0, count - num_held_out), held_out, None

    def _split(self, read: ReadSource, split: str) -> tuple[Samples, Samples | None, Samples | None]:
        """As `document_split` says."""
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
        """Those of the documents from `first` to before `last`."""
        if read.corpus is not None:
            return self._token_samples(Path(read.corpus.prefix), (first, last), self.tokenizer)
        is_all = (first, last) == (0, read.num_documents)
        return self._text_samples(read.documents if is_all else part_of(read.documents, range(first, last)))

    def _text_samples(self, documents: Any) -> Samples:
        assert self.tokenizer is not None, "there is one as soon as there is text"
        return self._samples(documents, self.tokenizer)

    def _samples(self, documents: Any, tokenizer: Tokenizer) -> Samples:
        """The samples that documents make; makes what is not in the cache yet."""
        prefix = prepare_corpus(
            documents,
            tokenizer,
            self.cache_directory,
            has_ends=self.has_ends,
            sentences=self.has_sentences,
            max_document_bytes=self.max_document_bytes,
            bad_documents=self.bad_documents,
        )
        samples = self._token_samples(prefix, None, tokenizer)
        return replace(samples, told="; ".join(filter(None, (samples.told, left_out(prefix)))))

    def _token_samples(self, prefix: Path, documents: tuple[int, int] | None, tokenizer: Tokenizer | None) -> Samples:
        """The samples of token files, of all documents or those from the first to before the second number."""
        raise ValueError(f"{type(self).__name__} makes its samples of text, and path ({prefix}) leads to token files")

    # --- blending ---------------------------------------------------------------------------------------------------

    @property
    def _weights(self) -> list[float]:
        return [source.weight for source in self._sources if source.weight > 0]

    def _blended_training(self, parts: list[Samples]) -> Samples:
        """Passes over the sources without an end."""
        sources = [part.epochs(seed=key(self.seed, "source", number)) for number, part in enumerate(parts)]
        blended = BlendedEpochs(sources, self._weights)
        counts = [part.count for part in parts]
        count = self.epoch_samples or max(blended.blend.most_samples(counts), 1)
        names = [str(source) for source in self._sources if source.weight > 0]
        shares = ", ".join(
            f"{share:.1%} of {name} ({size} samples{f'; {part.told}' if part.told else ''})"
            for share, name, size, part in zip(blended.blend.shares, names, counts, parts, strict=True)
        )
        return Samples(dataset=blended, count=count, told=f"{shares}; an epoch is {count} samples", is_infinite=True)

    def _blended(self, parts: list[Samples | None]) -> Samples | None:
        """As many of the sources' samples as can be blended without taking one twice."""
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
        told = "; ".join(filter(None, (part.told for part in found)))
        return Samples(dataset=BlendedSamples(sized, self._weights, count), count=count, told=told, is_ordered=True)

    def test_dataloader(self) -> list[DataLoader[Sample]]:
        """That for validation, unless documents are set apart for test."""
        return self._evaluation_loaders(self._tested) if self._tested is not None else self.val_dataloader()

    def _tokenizer_for(self, fingerprint: str, texts: Iterable[str]) -> Tokenizer:
        """The one that is given, or one that learns from texts of that fingerprint."""
        if self.tokenizer_path is not None:
            return load_tokenizer(self.tokenizer_path)
        # What else the tokens that it learns depend on.
        others = hashlib.sha256(repr((self.special_tokens, self.max_document_bytes)).encode()).hexdigest()[:8]
        path = self.cache_directory / f"tokenizer-{fingerprint}-{self.vocab_size}-{others}.json"
        if path.is_file():
            return load_tokenizer(path)
        return train_tokenizer(texts, self.vocab_size, path, self.special_tokens)

    def text_of(self, ids: Sequence[int]) -> str:
        """How a row of tokens is shown."""
        assert self.tokenizer is not None, "setup comes first; Trainer calls it"
        return self.tokenizer.decode(ids)

    @property
    def _documents_cache(self) -> Path:
        """Where what is read from files is kept."""
        return self.cache_directory / "documents"

    def predict_dataloader(self) -> DataLoader[Sample]:
        return prompt_loader([torch.tensor(ids) for ids in self._prompt_ids()], self.global_batch_size, self._replica)

    def _prompt_ids(self) -> list[list[int]]:
        """The tokens of each prompt. Raises ValueError for what a model cannot be asked."""
        assert self.tokenizer is not None, "setup comes first; Trainer calls it"
        # An empty prompt starts where a document would.
        return [ids or [self.tokenizer.end_of_text] for ids in self.tokenizer.encode(self.prompts)]


@contextmanager
def _about(what: str) -> Iterator[None]:
    """Says with what is wrong of which documents it is."""
    try:
        yield
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
