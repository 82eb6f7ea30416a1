"""`GPTDataModule`: packed samples of text for next-token prediction, from prepared or streamed documents."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.data import (
    BatchRamp,
    FillInTheMiddle,
    GPTSamples,
    LongDocuments,
    PackedDocuments,
    Tokenizer,
    load_tokenizer,
)
from lightning_megatron.data.sources import TextStream
from lightning_megatron.data.stream_options import StreamOptions, StreamSamples
from lightning_megatron.data.streaming import DocumentAssigner, StreamReader
from lightning_megatron.data.token_packers import DocumentPacker, StretchPacker, TokenPacker
from lightning_megatron.lightning_modules.corpus_data import CorpusDataConfig, CorpusDataModule
from lightning_megatron.lightning_modules.data_module import Samples
from lightning_megatron.lightning_modules.loaders import ResumableLoader
from lightning_megatron.lightning_modules.stream_loader import StreamLoader

SamplePacking = Literal["stream", "documents"]
"""Content of a sample: a stretch of all documents, or whole documents that do not attend to each other."""


@config_dataclass
class StreamingConfig:
    """Reading of text while it is trained on."""

    window_documents: int = 1000
    """Documents that are held in memory and shuffled together; 1 preserves the order of the text."""

    def __post_init__(self) -> None:
        if self.window_documents < 1:
            raise ValueError(
                f"window_documents ({self.window_documents}) must be at least 1, which keeps the order of the documents"
            )


@config_dataclass
class GPTDataConfig(CorpusDataConfig):
    """Text for next-token prediction, and how it is packed into samples."""

    streaming: StreamingConfig | bool | None = None
    """Reading, tokenizing and packing the text while it is trained on, in place of preparing it first: its settings,
    or true for their defaults. Needs path or dataset and a tokenizer."""
    packing: SamplePacking = "stream"
    """Content of a sample: a stretch of all documents concatenated ('stream'), or whole documents that do
    not attend to each other ('documents')."""
    long_documents: LongDocuments = "split"
    """Documents longer than a sample, where samples hold whole documents: cut into pieces that do not attend to each
    other ('split'), left out ('drop'), or an error ('refuse')."""
    separates_documents: bool = False
    """Whether attention and positions restart after each end of text within a stretch."""
    masks_end_of_text: bool = False
    """Whether the prediction that follows an end of text is left out of the loss."""
    fill_in_the_middle: FillInTheMiddle | None = None
    """Reordering of documents of a stretch so that the model learns to fill in the middle."""

    @property
    def stream(self) -> StreamingConfig | None:
        """Settings of the streaming; None where the text is prepared first."""
        if isinstance(self.streaming, bool):
            return StreamingConfig() if self.streaming else None
        return self.streaming


class GPTDataModule(CorpusDataModule):
    """Batches of `tokens`, `labels` and `loss_mask`, each [global_batch_size / dp, sequence_length], and of `segments`
    where documents of a sample are kept apart.

    A stretch is cut from all documents in a random order, and attention goes across their ends unless
    `separates_documents`. With `streaming` nothing is prepared and the text has no end: held out are the documents of
    `validation_path` alone, and an epoch is `epoch_samples`, or all of the Trainer's `max_steps`.
    """

    config: GPTDataConfig

    def __init__(self, config: GPTDataConfig) -> None:
        super().__init__(config)

    # --- faults -----------------------------------------------------------------------------------------------------

    def faults(self) -> list[str]:
        faults = super().faults() + [
            f"{name} ({value!r}) must be one of {', '.join(map(repr, choices))}"
            for name, value, choices in (
                ("packing", self.config.packing, get_args(SamplePacking)),
                ("long_documents", self.config.long_documents, get_args(LongDocuments)),
            )
            if value not in choices
        ]
        return faults + self._option_faults() + (self._streaming_faults() if self.config.stream is not None else [])

    @property
    def _stream_options(self) -> list[str]:
        """Names of those options that are set which apply to stretches only."""
        return [
            name
            for name in ("separates_documents", "masks_end_of_text", "fill_in_the_middle")
            if getattr(self.config, name) not in (False, None)
        ]

    def _option_faults(self) -> list[str]:
        faults, options = [], self._stream_options
        if self.config.packing == "documents" and options:
            faults.append(
                f"{', '.join(options)} must be left out with packing='documents', where samples hold whole documents"
                " that do not see each other and no end of text is an input; or use packing='stream'"
            )
        needing = options + (["packing='documents'"] if self.config.packing == "documents" else [])
        if needing and self.config.tokenizer is None and not self._has_text:
            faults.append(
                f"{', '.join(needing)} must know the end of text, and token files do not say it; give their tokenizer"
            )
        if (fill := self.config.fill_in_the_middle) is not None:
            tokens = (fill.prefix_token, fill.suffix_token, fill.middle_token)
            if min(tokens) < 0 or max(tokens) >= self.config.vocab_size:
                faults.append(
                    f"tokens of fill_in_the_middle {tokens} must be from 0 to below vocab_size"
                    f" ({self.config.vocab_size})"
                )
        return faults

    def _streaming_faults(self) -> list[str]:
        faults = []
        if self.config.blend is not None:
            faults.append("streaming reads one source; leave blend out, or streaming")
        elif any(source.has_tokens for source in self._sources):
            faults.append(
                f"token files ({self.config.path}) are mapped into memory and never read whole; leave streaming out"
            )
        elif self.config.path is None and self.config.dataset is None:
            faults.append("streaming reads a path or a dataset; give one of them")
        if self.config.tokenizer is None:
            faults.append("streaming reads no text before training that a tokenizer could learn from; give one")
        if self.config.document_split is not None:
            faults.append("document_split counts documents, which a stream does not; use validation_path, or leave it")
        if self.config.validation_fraction:
            faults.append(
                f"validation_fraction ({self.config.validation_fraction}) counts documents, which a stream does not;"
                " use validation_path, or leave it"
            )
        if self.config.packing == "documents" and self.config.long_documents == "refuse":
            faults.append("long_documents='refuse' must see all documents first; use 'split' or 'drop' with streaming")
        return faults

    @property
    def _has_free_epochs(self) -> bool:
        return super()._has_free_epochs or self.config.stream is not None

    # --- samples ----------------------------------------------------------------------------------------------------

    def _prepare(self) -> tuple[Samples | None, Samples | None]:
        if self.config.stream is None:
            return super()._prepare()
        self.tokenizer = load_tokenizer(str(self.config.tokenizer))
        if self._only_predicts:
            return None, None
        # Reading the first text makes a missing dataset, column or text an error before training.
        TextStream(**self._stream_source, is_logging=False).require_text()
        return None, None if self.config.validation_path is None else self._validation()

    @property
    def _stream_source(self) -> dict[str, Any]:
        return {
            "path": self.config.path,
            "dataset": self.config.dataset,
            "text_column": self.config.text_column,
            "bad_documents": self.config.bad_documents,
            "max_document_bytes": self.config.max_document_bytes,
        }

    def _token_samples(self, prefix: Path, documents: tuple[int, int] | None, tokenizer: Tokenizer | None) -> Samples:
        if self.config.packing == "stream":
            stretches = GPTSamples(
                prefix,
                self.sequence_length,
                seed=self.config.seed,
                documents=documents,
                index_directory=self.config.cache_directory,
            )
            return Samples(dataset=StreamSamples(stretches, self._options(tokenizer)), count=len(stretches))
        assert tokenizer is not None, "a fault says so"
        rows = PackedDocuments(
            prefix,
            self.sequence_length,
            end_of_text=tokenizer.end_of_text,
            seed=self.config.seed,
            long_documents=self.config.long_documents,
            documents=documents,
            index_directory=self.config.cache_directory,
        )
        return Samples(dataset=rows, count=len(rows), summary=str(rows))

    def _options(self, tokenizer: Tokenizer | None) -> StreamOptions:
        return StreamOptions(
            end_of_text=None if tokenizer is None else tokenizer.end_of_text,
            fill=self.config.fill_in_the_middle,
            separates_documents=self.config.separates_documents,
            masks_end_of_text=self.config.masks_end_of_text,
            seed=self.config.seed,
        )

    # --- streaming --------------------------------------------------------------------------------------------------

    def _training_loader(self) -> ResumableLoader | StreamLoader:
        if self.config.stream is None:
            return super()._training_loader()
        self._refuse_overfitting()
        make_reader = partial(
            _reader,
            source=self._stream_source,
            tokenizer=self._ready_tokenizer,
            make_packer=self._make_packer(self._ready_tokenizer),
            ramp=self._ramp,
            window=self.config.stream.window_documents,
            seed=self.config.seed,
        )
        return StreamLoader(
            make_reader,
            ramp=self._ramp,
            num_batches=self._num_streamed_batches(),
            replica=self._replica,
            num_workers=self.config.num_workers,
        )

    def _num_streamed_batches(self) -> int:
        """Global batches of one epoch of streamed text."""
        steps = 0 if self.trainer is None else self.trainer.max_steps
        if self.config.epoch_samples:
            count = self._ramp.num_batches(self.config.epoch_samples)
        else:
            count = 0 if self.trainer is None else max(steps, 0) * self.trainer.accumulate_grad_batches
        if count < 1:
            raise ValueError(
                f"streamed text has no end, and epoch_samples ({self.config.epoch_samples}) and the Trainer's max_steps"
                f" ({steps}) do not say one; set one of them to a batch or more"
            )
        return count

    def _make_packer(self, tokenizer: Tokenizer) -> Callable[[], TokenPacker]:
        if self.config.packing == "stream":
            return partial(StretchPacker, self.sequence_length, self._options(tokenizer))
        assert self.config.long_documents != "refuse", "a fault says so"
        return partial(
            DocumentPacker,
            self.sequence_length,
            end_of_text=tokenizer.end_of_text,
            long_documents=self.config.long_documents,
            seed=self.config.seed,
        )


def _reader(
    packers: Sequence[int],
    *,
    source: dict[str, Any],
    tokenizer: Tokenizer,
    make_packer: Callable[[], TokenPacker],
    ramp: BatchRamp,
    window: int,
    seed: int,
) -> StreamReader:
    """A reader made of arguments that pickle, so that a loader's worker process can make it."""
    # All readers meet the same bad documents, so one logs them. What the tokenizer refuses, one reader alone meets.
    stream = TextStream(**source, is_logging=packers[0] == 0)
    assigner = DocumentAssigner(stream, num_packers=ramp.unit, window=window, seed=seed)
    return StreamReader(assigner, tokenizer, make_packer, packers, ramp)
