"""`GPTDataModule`: packed samples of text for next-token prediction."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_megatron.data import (
    BatchRamp,
    FillInTheMiddle,
    GPTSamples,
    LongDocuments,
    PackedDocuments,
    Tokenizer,
    load_tokenizer,
)
from lightning_megatron.data.document_files import MAX_DOCUMENT_BYTES, BadDocuments
from lightning_megatron.data.sources import TextStream
from lightning_megatron.data.stream_options import StreamOptions, StreamSamples
from lightning_megatron.data.streaming import DocumentAssigner, StreamReader
from lightning_megatron.data.token_packers import DocumentPacker, StretchPacker, TokenPacker
from lightning_megatron.lightning_modules.data_module import Samples
from lightning_megatron.lightning_modules.loaders import ResumableLoader
from lightning_megatron.lightning_modules.stream_loader import StreamLoader
from lightning_megatron.lightning_modules.text_data import TextDataModule
from lightning_megatron.lightning_modules.text_sources import BlendSource

Packing = Literal["stream", "documents"]
"""What shares a row: pieces of one long text, or whole documents that do not see each other."""


@dataclass(frozen=True, kw_only=True)
class StreamingConfig:
    """How text is read while it is trained on."""

    window_documents: int = 1000
    """That are in memory and in a random order together; 1: in their own order."""

    def __post_init__(self) -> None:
        if self.window_documents < 1:
            raise ValueError(
                f"window_documents ({self.window_documents}) must be at least 1, which keeps the order of the documents"
            )


class GPTDataModule(TextDataModule):
    """Batches of `tokens`, `labels` and `loss_mask`, each [global_batch_size / replicas, sequence_length].

    Sources, tokenizer and what is held out are those of TextDataModule. With `packing="stream"` the documents follow
    each other, in an order that the seed gives, in one long row that is cut into samples, and attention goes across
    their ends. With "documents" a sample holds whole documents, and the batches have `segments` too, which keeps
    attention within each; `long_documents` says what becomes of those longer than a sample: "split" cuts them into
    pieces that do not see each other, "drop" leaves them out, "refuse" is a fault.

    Of a stream, `separates_documents` gives batches `segments` too, so that attention and positions begin again behind
    the end of text; `masks_end_of_text` leaves out of the loss what follows it; and `fill_in_the_middle` tells
    documents in another order.

    With `streaming` nothing is prepared: text is read, tokenized and packed while it is trained on, and has no end. A
    tokenizer must be given; held out are the documents of `validation_path` alone; an epoch is `epoch_samples`, or all
    of the Trainer's `max_steps`.
    """

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
        streaming: StreamingConfig | None = None,
        epoch_samples: int = 0,
        tokenizer: str | None = None,
        packing: Packing = "stream",
        long_documents: LongDocuments = "split",
        separates_documents: bool = False,
        masks_end_of_text: bool = False,
        fill_in_the_middle: FillInTheMiddle | None = None,
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
        self.streaming = streaming
        self.packing = packing
        self.long_documents = long_documents
        self.separates_documents = separates_documents
        self.masks_end_of_text = masks_end_of_text
        self.fill_in_the_middle = fill_in_the_middle
        super().__init__(
            vocab_size=vocab_size,
            sequence_length=sequence_length,
            global_batch_size=global_batch_size,
            path=path,
            dataset=dataset,
            text_column=text_column,
            blend=blend,
            epoch_samples=epoch_samples,
            tokenizer=tokenizer,
            validation_fraction=validation_fraction,
            validation_path=validation_path,
            document_split=document_split,
            bad_documents=bad_documents,
            max_document_bytes=max_document_bytes,
            batch_ramp=batch_ramp,
            prompts=prompts,
            num_workers=num_workers,
            seed=seed,
            cache_directory=cache_directory,
        )

    # --- faults -----------------------------------------------------------------------------------------------------

    def faults(self) -> list[str]:
        faults = super().faults() + [
            f"{name} ({value!r}) must be one of {', '.join(map(repr, choices))}"
            for name, value, choices in (
                ("packing", self.packing, get_args(Packing)),
                ("long_documents", self.long_documents, get_args(LongDocuments)),
            )
            if value not in choices
        ]
        return faults + self._option_faults() + (self._streaming_faults() if self.streaming is not None else [])

    @property
    def _stream_options(self) -> list[str]:
        """The names of options of a stream that are set."""
        return [
            name
            for name in ("separates_documents", "masks_end_of_text", "fill_in_the_middle")
            if getattr(self, name) not in (False, None)
        ]

    def _option_faults(self) -> list[str]:
        faults, options = [], self._stream_options
        if self.packing == "documents" and options:
            faults.append(
                f"{', '.join(options)} must be left out with packing='documents', where samples hold whole documents"
                " that do not see each other and no end of text is an input; or use packing='stream'"
            )
        needing = options + (["packing='documents'"] if self.packing == "documents" else [])
        if needing and self.tokenizer_path is None and not self._has_text:
            faults.append(
                f"{', '.join(needing)} must know the end of text, and token files do not say it; give their tokenizer"
            )
        if (fill := self.fill_in_the_middle) is not None:
            tokens = (fill.prefix_token, fill.suffix_token, fill.middle_token)
            if min(tokens) < 0 or max(tokens) >= self.vocab_size:
                faults.append(
                    f"tokens of fill_in_the_middle {tokens} must be from 0 to below vocab_size ({self.vocab_size})"
                )
        return faults

    def _streaming_faults(self) -> list[str]:
        faults = []
        if self.blend is not None:
            faults.append("streaming reads one source; leave blend out, or streaming")
        elif any(source.has_tokens for source in self._sources):
            faults.append(f"token files ({self.path}) are mapped into memory and never read whole; leave streaming out")
        elif self.path is None and self.dataset is None:
            faults.append("streaming reads a path or a dataset; give one of them")
        if self.tokenizer_path is None:
            faults.append("streaming reads no text before training that a tokenizer could learn from; give one")
        if self.document_split is not None:
            faults.append("document_split counts documents, which a stream does not; use validation_path, or leave it")
        if self.validation_fraction:
            faults.append(
                f"validation_fraction ({self.validation_fraction}) counts documents, which a stream does not; use"
                " validation_path, or leave it"
            )
        if self.packing == "documents" and self.long_documents == "refuse":
            faults.append("long_documents='refuse' must see all documents first; use 'split' or 'drop' with streaming")
        return faults

    @property
    def _has_free_epochs(self) -> bool:
        return super()._has_free_epochs or self.streaming is not None

    # --- samples ----------------------------------------------------------------------------------------------------

    def _prepare(self) -> tuple[Samples | None, Samples | None]:
        if self.streaming is None:
            return super()._prepare()
        self.tokenizer = load_tokenizer(str(self.tokenizer_path))
        if self._only_predicts:
            return None, None
        # A first look, so that a missing dataset or column, and what is no text, is told before training.
        TextStream(**self._stream_source, is_telling=False).require_text()
        return None, None if self.validation_path is None else self._validation()

    @property
    def _stream_source(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "dataset": self.dataset,
            "text_column": self.text_column,
            "bad_documents": self.bad_documents,
            "max_document_bytes": self.max_document_bytes,
        }

    def _token_samples(self, prefix: Path, documents: tuple[int, int] | None, tokenizer: Tokenizer | None) -> Samples:
        if self.packing == "stream":
            stretches = GPTSamples(
                prefix,
                self.sequence_length,
                seed=self.seed,
                documents=documents,
                index_directory=self.cache_directory,
            )
            return Samples(dataset=StreamSamples(stretches, self._options(tokenizer)), count=len(stretches))
        assert tokenizer is not None, "a fault says so"
        rows = PackedDocuments(
            prefix,
            self.sequence_length,
            end_of_text=tokenizer.end_of_text,
            seed=self.seed,
            long_documents=self.long_documents,
            documents=documents,
            index_directory=self.cache_directory,
        )
        return Samples(dataset=rows, count=len(rows), told=str(rows))

    def _options(self, tokenizer: Tokenizer | None) -> StreamOptions:
        return StreamOptions(
            end_of_text=None if tokenizer is None else tokenizer.end_of_text,
            fill=self.fill_in_the_middle,
            separates_documents=self.separates_documents,
            masks_end_of_text=self.masks_end_of_text,
            seed=self.seed,
        )

    # --- streaming --------------------------------------------------------------------------------------------------

    def _training_loader(self) -> ResumableLoader | StreamLoader:
        if self.streaming is None:
            return super()._training_loader()
        self._refuse_overfitting()
        assert self.tokenizer is not None, "setup comes first; Trainer calls it"
        make_reader = partial(
            _reader,
            source=self._stream_source,
            tokenizer=self.tokenizer,
            make_packer=self._make_packer(self.tokenizer),
            ramp=self._ramp,
            window=self.streaming.window_documents,
            seed=self.seed,
        )
        return StreamLoader(
            make_reader,
            ramp=self._ramp,
            num_batches=self._num_streamed_batches(),
            replica=self._replica,
            num_workers=self.num_workers,
        )

    def _num_streamed_batches(self) -> int:
        """Of an epoch."""
        steps = 0 if self.trainer is None else self.trainer.max_steps
        if self.epoch_samples:
            count = self._ramp.num_batches(self.epoch_samples)
        else:
            count = 0 if self.trainer is None else max(steps, 0) * self.trainer.accumulate_grad_batches
        if count < 1:
            raise ValueError(
                f"streamed text has no end, and epoch_samples ({self.epoch_samples}) and the Trainer's max_steps"
                f" ({steps}) do not say one; set one of them to a batch or more"
            )
        return count

    def _make_packer(self, tokenizer: Tokenizer) -> Callable[[], TokenPacker]:
        if self.packing == "stream":
            return partial(StretchPacker, self.sequence_length, self._options(tokenizer))
        assert self.long_documents != "refuse", "a fault says so"
        return partial(
            DocumentPacker,
            self.sequence_length,
            end_of_text=tokenizer.end_of_text,
            long_documents=self.long_documents,
            seed=self.seed,
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
    """A reader in a process of its own: all that it is made of can be sent there."""
    # All readers meet the same documents: one names the bad ones. What a tokenizer refuses one reader meets alone.
    stream = TextStream(**source, is_telling=packers[0] == 0)
    assigner = DocumentAssigner(stream, num_packers=ramp.unit, window=window, seed=seed)
    return StreamReader(assigner, tokenizer, make_packer, packers, ramp)
