"""`TextDataModule`: the base of all ready data modules of text: tokenizer, held-out text and prompts."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.data import Tokenizer, load_tokenizer, train_tokenizer
from lightning_megatron.data.collate import Sample
from lightning_megatron.data.document_files import MAX_DOCUMENT_BYTES
from lightning_megatron.data.tokenizer import SMALLEST_VOCABULARY
from lightning_megatron.lightning_modules.data_module import LoaderConfig, ParallelDataModule, as_configuration_error
from lightning_megatron.lightning_modules.loaders import prompt_loader
from lightning_megatron.lightning_modules.text_sources import BlendSource
from lightning_megatron.trainer.config import ConfigurationError

# The entry of the state of data that tells tokenizers apart.
_TOKENIZER = "tokenizer"


@config_dataclass
class TextDataConfig(LoaderConfig):
    """Text, its tokenizer, what is held out of it, and prompts."""

    sequence_length: int
    """Tokens of a sample; for conversations, the most of one."""
    path: str | None = None
    """File, directory or glob pattern of the text, or the prefix of Megatron's .bin and .idx files. Without path and
    dataset the text is Python's standard library, or drawn images for LLaVA."""
    dataset: str | None = None
    """Name of a data set that `datasets` loads, as 'name' or 'name:config', or the directory of a local one."""
    tokenizer: str | None = None
    """Tokenizer of the text: a tokenizer file, or the directory of a Hugging Face model. Without one a byte-level
    tokenizer is trained on the text."""
    validation_fraction: float | None = None
    """Fraction of the documents held out for validation and test; 0 holds out none. Unless another option holds text
    out, it is 0.02, and 0.05 for conversations."""
    validation_path: str | None = None
    """File, directory or glob pattern of text for validation and test, in place of a fraction of the training text."""
    prompts: list[str] = field(default_factory=list)
    """Texts for `predict` to complete, answer or fill in, global_batch_size of them at a time."""
    cache_directory: str = "runs/data"
    """Directory of what is prepared once: trained tokenizers, token files and indices, named after what they hold."""


class TextDataModule(ParallelDataModule):
    """Samples of text and prompts to predict from, with the tokenizer of both."""

    config: TextDataConfig
    special_tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens, in addition to the end of text, of a tokenizer that is trained here."""
    default_fraction: ClassVar[float] = 0.02
    """Fraction of documents held out where no option says which."""

    def __init__(self, config: TextDataConfig) -> None:
        super().__init__(config)
        self.tokenizer: Tokenizer | None = None
        """The tokenizer, from `setup` on; None for token files without one."""
        self.trained_tokenizer: Path | None = None
        """The file of the tokenizer that was trained on the text, from `setup` on; None for a given one."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample; for conversations, the most of one."""
        return self.config.sequence_length

    @property
    def _ready_tokenizer(self) -> Tokenizer:
        assert self.tokenizer is not None, "setup comes first; Trainer calls it"
        return self.tokenizer

    @property
    def _cache(self) -> Path:
        return Path(self.config.cache_directory)

    @property
    def _documents_cache(self) -> Path:
        """Directory in which `datasets` caches the documents of files."""
        return self._cache / "documents"

    @property
    def _sources(self) -> list[BlendSource]:
        return [BlendSource(weight=1.0, path=self.config.path, dataset=self.config.dataset)]

    @property
    def _validation_source(self) -> BlendSource:
        return BlendSource(weight=1.0, path=self.config.validation_path)

    @property
    def _has_text(self) -> bool:
        """Whether any of the sources is to be tokenized."""
        return not all(source.has_tokens for source in self._sources)

    # --- faults -----------------------------------------------------------------------------------------------------

    def faults(self) -> list[str]:
        faults = super().faults() + self.sample_faults()
        if not 0 <= self._held_out_fraction < 1:
            faults.append(f"validation_fraction ({self.config.validation_fraction}) must be at least 0 and below 1")
        return faults + self._source_faults() + self._tokenizer_faults()

    def sample_faults(self) -> list[str]:
        """One sentence for each option that no sample can satisfy, whatever the text; the planner checks them too."""
        if self.sequence_length < 1:
            return [f"sequence_length ({self.sequence_length}) must be at least 1"]
        return []

    @property
    def _held_out_fraction(self) -> float:
        given = self.config.validation_fraction
        return self.default_fraction if given is None else given

    @property
    def _held_out_options(self) -> dict[str, object]:
        """The options that set what is held out; a fraction of 0 holds out nothing."""
        return {name: getattr(self.config, name) for name in ("validation_fraction", "validation_path")}

    def _training_source_faults(self) -> list[str]:
        return self._sources[0].faults()

    def _source_faults(self) -> list[str]:
        faults = self._training_source_faults()
        if self.config.validation_path is not None:
            faults += [f"validation_path: {fault}" for fault in self._validation_source.faults()]
        given = [f"{name} ({value!r})" for name, value in self._held_out_options.items() if value]
        if len(given) > 1:
            faults.append(f"{' and '.join(given)} all say what is held out; give one of them")
        return faults

    def _tokenizer_faults(self) -> list[str]:
        """One sentence for each thing that is wrong with the tokenizer, or with training one."""
        return []

    def _vocabulary_faults(self, vocab_size: int) -> list[str]:
        """The fault of a vocabulary that is too small for the tokenizer, or for training one."""
        path = self.config.tokenizer
        if path is None:
            smallest = SMALLEST_VOCABULARY + len(self.special_tokens)
            if vocab_size >= smallest:
                return []
            others = f" and {len(self.special_tokens)} special tokens" if self.special_tokens else ""
            return [
                f"vocab_size ({vocab_size}) must be at least {smallest} for a tokenizer to be trained: "
                f"the 256 bytes, the end of text{others}; raise it, or give a tokenizer"
            ]
        try:
            needed = load_tokenizer(path).vocab_size
        except ValueError as error:
            return [str(error)]
        if needed <= vocab_size:
            return []
        return [f"vocab_size ({vocab_size}) must be at least that of the tokenizer ({path}), {needed}"]

    # --- preparing --------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        if stage == "predict" and not self.config.prompts:
            name = type(self.config).__name__
            raise ConfigurationError(
                "there are no prompts to predict from; give some, as --data.prompts '[\"Who are you?\"]' or "
                f'{name}(prompts=["Who are you?"])'
            )
        if stage == "predict" and self.config.tokenizer is None and not self._has_text:
            raise ConfigurationError("token files alone say no text of a token; give the tokenizer to predict")
        super().setup(stage)
        if stage == "predict":
            # Wrong prompts are an error before a model is built.
            with as_configuration_error():
                self._prompt_ids()

    def _trained_tokenizer(
        self, fingerprint: str, texts: Iterable[str], vocab_size: int, max_document_bytes: int = MAX_DOCUMENT_BYTES
    ) -> Tokenizer:
        """A tokenizer trained on the texts of that fingerprint; the cached one where there is one."""
        settings = hashlib.sha256(repr((self.special_tokens, max_document_bytes)).encode()).hexdigest()[:8]
        path = self._cache / f"tokenizer-{fingerprint}-{vocab_size}-{settings}.json"
        self.trained_tokenizer = path
        if path.is_file():
            return load_tokenizer(path)
        return train_tokenizer(texts, vocab_size, path, self.special_tokens)

    # --- resuming ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        own = {} if self.tokenizer is None else {_TOKENIZER: self.tokenizer.fingerprint}
        return super().state_dict() | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        others = {name: value for name, value in state_dict.items() if name != _TOKENIZER}
        saved = state_dict.get(_TOKENIZER)
        if saved is not None and self.tokenizer is not None and self.tokenizer.fingerprint != saved:
            trained = "one trained on this text" if self.config.tokenizer is None else str(self.config.tokenizer)
            rank_zero_warn(
                f"the tokenizer ({trained}) is not that of the run which saved the checkpoint, and the model knows the "
                "ids of that one: give data.path and the other options of the data as they were there, or the "
                "tokenizer's file in its data.cache_directory as data.tokenizer"
            )
        if others:
            super().load_state_dict(others)

    # --- prediction -------------------------------------------------------------------------------------------------

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of a row of tokens, as it is printed."""
        return self._ready_tokenizer.decode(ids)

    def predict_dataloader(self) -> DataLoader[Sample]:
        ids = [torch.tensor(ids) for ids in self._prompt_ids()]
        return prompt_loader(ids, self.global_batch_size, self._replica, self._prompt_entries)

    @property
    def _prompt_entries(self) -> list[Sample] | None:
        """Further entries of each prompt's row of a batch."""
        return None

    def _prompt_ids(self) -> list[list[int]]:
        """The tokens of each prompt. Raises ValueError for prompts that a model cannot take."""
        # An empty prompt starts where a document would.
        tokenizer = self._ready_tokenizer
        return [ids or [tokenizer.end_of_text] for ids in tokenizer.encode(self.config.prompts)]


def require_fitting_tokenizer(data: object, path: str, vocab_size: int) -> None:
    """Raises ConfigurationError for a data module whose tokenizer has more ids than the model at `path`."""
    if not isinstance(data, TextDataModule) or (tokenizer := data.tokenizer) is None:
        return
    if tokenizer.vocab_size > vocab_size:
        raise ConfigurationError(
            f"the tokenizer ({data.config.tokenizer}) has ids up to {tokenizer.vocab_size - 1}, and the model "
            f"({path}) has a vocabulary of {vocab_size}; give the tokenizer of the model"
        )
