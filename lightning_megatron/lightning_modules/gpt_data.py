"""`GPTDataModule`: packed samples of text for next-token prediction, from files, a named dataset or Python's library.

One process prepares (reads the documents, trains a tokenizer where none is given, writes the tokens); all processes
then map the same files. The order of samples depends on the seed and the global batch size alone, and a resumed run
goes on after the last sample that was trained on, on any layout.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_megatron.data import (
    LongDocuments,
    PackedDocuments,
    PackedTokens,
    Tokenizer,
    collate_tokens,
    load_documents,
    load_tokenizer,
    prepare_tokens,
    split_documents,
    train_tokenizer,
)
from lightning_megatron.data.sources import corpus_fingerprint, files_of
from lightning_megatron.data.tokenizer import SMALLEST_VOCABULARY
from lightning_megatron.lightning_modules.loaders import (
    Collate,
    ReplicaLoader,
    Sample,
    evaluation_loader,
    prompt_loader,
    training_loader,
)
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.replica import Replica

Packing = Literal["stream", "documents", "none"]
"""What shares a row: pieces of one long text, whole documents that do not see each other, or nothing."""


@dataclass(frozen=True)
class Samples:
    """A data set and how many samples it has."""

    dataset: Dataset[Sample]
    count: int
    told: str = ""
    # what became of the text, for the log


class GPTDataModule(L.LightningDataModule):
    """Batches of `tokens`, `labels` and `loss_mask`, each [global_batch_size / replicas, sequence_length].

    Text comes from `path` (a file, a directory or a pattern), from `dataset` (a name that `datasets` knows, or a local
    one), or, where neither is given, from the source files of Python's standard library. Without `tokenizer` (a
    tokenizer.json, or a directory with one) a byte-level one of `vocab_size` tokens is trained on that text.

    With `packing="stream"` the documents follow each other in one long row that is cut into samples, and attention goes
    across their ends. With "documents" a sample holds whole documents, and the batches have `segments` too, which keeps
    attention within each; `long_documents` says what becomes of those longer than a sample: "split" cuts them into
    pieces that do not see each other, "drop" leaves them out, "refuse" is a fault.

    `validation_fraction` of the documents (of the samples, where there is one document) is held out for validation and
    test. `prompts` are the texts that prediction goes on with. What is prepared lies in `cache_directory`, under names
    that say corpus and tokenizer.
    """

    packings: ClassVar[tuple[Packing, ...]] = ("stream", "documents")
    # that these data have

    def __init__(
        self,
        *,
        vocab_size: int,
        sequence_length: int,
        global_batch_size: int,
        path: str | None = None,
        dataset: str | None = None,
        text_column: str = "text",
        tokenizer: str | None = None,
        packing: Packing = "stream",
        long_documents: LongDocuments = "split",
        validation_fraction: float = 0.02,
        prompts: list[str] | None = None,
        num_workers: int = 0,
        seed: int = 0,
        cache_directory: str = "runs/data",
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.global_batch_size = global_batch_size
        self.path = path
        self.dataset = dataset
        self.text_column = text_column
        self.tokenizer_path = tokenizer
        self.packing = packing
        self.long_documents = long_documents
        self.validation_fraction = validation_fraction
        self.prompts = prompts or []
        self.num_workers = num_workers
        self.seed = seed
        self.cache_directory = Path(cache_directory)
        self.tokenizer: Tokenizer | None = None
        # there from `setup` on
        self._training: Samples | None = None
        self._held_out: Samples | None = None
        self._loader: ReplicaLoader | None = None
        self._resumed: dict[str, Any] | None = None
        # a checkpoint's state, until the loader that it is for exists

    def faults(self) -> list[str]:
        """One sentence for each thing that keeps the text from loading, as far as it shows without reading any."""
        faults = [
            f"{name} ({value}) must be at least {least}"
            for name, value, least in (
                ("sequence_length", self.sequence_length, 1),
                ("global_batch_size", self.global_batch_size, 1),
                ("num_workers", self.num_workers, 0),
            )
            if value < least
        ]
        faults += [
            f"{name} ({value!r}) must be one of {', '.join(map(repr, choices))}"
            for name, value, choices in (
                ("packing", self.packing, self.packings),
                ("long_documents", self.long_documents, get_args(LongDocuments)),
            )
            if value not in choices
        ]
        if not 0 <= self.validation_fraction < 1:
            faults.append(f"validation_fraction ({self.validation_fraction}) must be at least 0 and below 1")
        if self.path is not None and self.dataset is not None:
            faults.append(f"path ({self.path!r}) and dataset ({self.dataset!r}) are both given; one source is read")
        try:
            if self.path is not None:
                files_of(self.path)
        except ValueError as error:
            faults.append(str(error))
        return faults + self._tokenizer_faults()

    def _tokenizer_faults(self) -> list[str]:
        if self.tokenizer_path is None:
            if self.vocab_size >= SMALLEST_VOCABULARY:
                return []
            return [
                f"vocab_size ({self.vocab_size}) must be at least {SMALLEST_VOCABULARY} for a tokenizer to be trained: "
                "the 256 bytes and the end of text; raise it, or give a tokenizer"
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

    # --- preparing --------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        try:
            self._prepare()
        except ConfigurationError:
            # Only some processes come here, and the others wait for them: `setup` meets the same fault on every one.
            return

    def setup(self, stage: str) -> None:
        if stage == "predict" and not self.prompts:
            raise ConfigurationError(
                [
                    "there are no prompts to predict from; give some, as --data.prompts '[\"Who are you?\"]' or "
                    f'{type(self).__name__}(prompts=["Who are you?"])'
                ]
            )
        self.tokenizer, self._training, self._held_out = self._prepare()
        for what, samples in (("training", self._training), ("validation", self._held_out)):
            if samples is not None and samples.told:
                rank_zero_info(f"{what}: {samples.told}")

    def teardown(self, stage: str) -> None:
        self._loader = None
        self._resumed = None

    def _prepare(self) -> tuple[Tokenizer, Samples | None, Samples | None]:
        """Tokenizer, samples to train on and samples held out; makes what is not in the cache yet."""
        if faults := self.faults():
            raise ConfigurationError(faults)
        with told_as_fault():
            if self.tokenizer_path is not None and self._only_predicts:
                return load_tokenizer(self.tokenizer_path), None, None
            documents = load_documents(
                path=self.path,
                dataset=self.dataset,
                text_column=self.text_column,
                # A named dataset may lie in the cache of `datasets` already.
                cache_dir=self.cache_directory / "documents" if self.dataset is None else None,
            )
            tokenizer = self._tokenizer_for(documents)
            if self._only_predicts:
                return tokenizer, None, None
            if self.validation_fraction > 0 and len(documents) > 1:
                kept, held_out = split_documents(documents, self.validation_fraction)
                return tokenizer, self._samples(kept, tokenizer), self._samples(held_out, tokenizer)
            return tokenizer, *self._cut(self._samples(documents, tokenizer))

    @property
    def _only_predicts(self) -> bool:
        return self.trainer is not None and self.trainer.state.fn == TrainerFn.PREDICTING

    def _tokenizer_for(self, documents: Any) -> Tokenizer:
        if self.tokenizer_path is not None:
            return load_tokenizer(self.tokenizer_path)
        path = self.cache_directory / f"tokenizer-{corpus_fingerprint(documents)}-{self.vocab_size}.json"
        if path.is_file():
            return load_tokenizer(path)
        return train_tokenizer(documents["text"], self.vocab_size, path)

    def _samples(self, documents: Any, tokenizer: Tokenizer) -> Samples:
        path = prepare_tokens(documents, tokenizer, self.cache_directory)
        if self.packing == "stream":
            stream = PackedTokens(path, self.sequence_length)
            return Samples(stream, len(stream))
        rows = PackedDocuments(
            path,
            self.sequence_length,
            end_of_text=tokenizer.end_of_text,
            seed=self.seed,
            long_documents=self.long_documents,
        )
        return Samples(rows, len(rows), str(rows))

    def _cut(self, samples: Samples) -> tuple[Samples, Samples | None]:
        """The samples without their last part, and that part: one document alone cannot be held out."""
        num_held_out = min(round(samples.count * self.validation_fraction), samples.count - 1)
        if num_held_out == 0:
            return samples, None
        count = samples.count - num_held_out
        return (
            Samples(Subset(samples.dataset, range(count)), count, samples.told),
            Samples(Subset(samples.dataset, range(count, samples.count)), num_held_out),
        )

    # --- loaders ----------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> ReplicaLoader:
        assert self._training is not None, "setup comes first; Trainer calls it"
        with told_as_fault():
            loader = training_loader(
                self._training.dataset,
                self._training.count,
                global_batch_size=self.global_batch_size,
                replica=self._replica,
                seed=self.seed,
                num_workers=self.num_workers,
                collate=self._collate,
            )
        if self._resumed is not None:
            loader.load_state_dict(self._resumed)
            self._resumed = None
        self._loader = loader
        return loader

    def val_dataloader(self) -> list[DataLoader[Sample]]:
        """One loader, and none where nothing is held out."""
        if self._held_out is None:
            return []
        with told_as_fault():
            return [
                evaluation_loader(
                    self._held_out.dataset,
                    self._held_out.count,
                    global_batch_size=self.global_batch_size,
                    replica=self._replica,
                    num_workers=self.num_workers,
                    collate=self._collate,
                )
            ]

    def test_dataloader(self) -> list[DataLoader[Sample]]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Sample]:
        assert self.tokenizer is not None, "setup comes first; Trainer calls it"
        # An empty prompt starts where a document would.
        ids = [encoded or [self.tokenizer.end_of_text] for encoded in self.tokenizer.encode(self.prompts)]
        return prompt_loader([torch.tensor(prompt) for prompt in ids])

    @property
    def _collate(self) -> Collate:
        """What makes a batch of samples."""
        return collate_tokens

    @property
    def _replica(self) -> Replica:
        assert self.trainer is not None, "loaders are made for a Trainer, which says how many replicas there are"
        return Replica.under(self.trainer.strategy)

    # --- resuming ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {} if self._loader is None else self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Lightning may ask for the loader before it reads the checkpoint, or after.
        if self._loader is None:
            self._resumed = state_dict
        else:
            self._loader.load_state_dict(state_dict)


@contextmanager
def told_as_fault() -> Iterator[None]:
    """What `data` says with a ValueError is about what the user gave."""
    try:
        yield
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError([str(error)]) from error
