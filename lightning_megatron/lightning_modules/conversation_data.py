"""`ConversationDataModule`: the base of data modules whose samples are conversations, read as rows of a table."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.data import Tokenizer, load_chat_template, load_rows, load_tokenizer, split_documents
from lightning_megatron.data.packed_rows import IGNORE_INDEX, NO_SEGMENT
from lightning_megatron.lightning_modules.text_data import TextDataConfig, TextDataModule

ChatPacking = Literal["none", "documents"]
"""Content of a row of a batch: one sample, or several that do not attend to each other."""


@config_dataclass
class ConversationDataConfig(TextDataConfig):
    """A table of conversations, and how its rows become a batch."""

    split: str = "train"
    """Split of `dataset` that is trained on."""
    pad_to_multiple: int = 8
    """Multiple of tokens that the longest sample of a batch is padded to."""
    packing: ChatPacking = "none"
    """Content of a row of a batch: one sample ('none'), or samples up to sequence_length that do not attend to each
    other ('documents'); global_batch_size counts rows."""


class ConversationDataModule(TextDataModule):
    """Rows of a table as samples of uneven length, of which the answers alone have labels."""

    config: ConversationDataConfig

    def __init__(self, config: ConversationDataConfig) -> None:
        super().__init__(config)

    @property
    def hides_padding(self) -> bool:
        """Whether batches have padding that no `segments` mark."""
        return self.config.packing == "none"

    @property
    def _choices(self) -> Mapping[str, Any]:
        """The type of each option that has a fixed set of values."""
        return {"packing": ChatPacking}

    def faults(self) -> list[str]:
        faults = super().faults()
        faults += [
            f"{name} ({value!r}) must be one of {', '.join(map(repr, get_args(choices)))}"
            for name, choices in self._choices.items()
            if (value := getattr(self.config, name)) not in get_args(choices)
        ]
        if self.config.pad_to_multiple < 1:
            faults.append(f"pad_to_multiple ({self.config.pad_to_multiple}) must be at least 1")
        return faults

    def _rows(self) -> Any:
        # A named data set may lie in the cache of `datasets` already.
        cache = self._documents_cache if self.config.dataset is None else None
        return load_rows(path=self.config.path, dataset=self.config.dataset, split=self.config.split, cache_dir=cache)

    def _split_rows(self, rows: Any) -> tuple[Any, Any]:
        """The rows to train on, and the rows held out or None."""
        if self.config.validation_path is not None:
            return rows, load_rows(path=self.config.validation_path, cache_dir=self._documents_cache)
        return split_documents(rows, self._held_out_fraction) if self._held_out_fraction > 0 else (rows, None)

    def _padding(self, tokenizer: Tokenizer) -> dict[str, int]:
        """The value of each entry of a batch after the end of a sample."""
        padding = {"tokens": tokenizer.end_of_text, "labels": IGNORE_INDEX, "loss_mask": 0}
        return {**padding, "segments": NO_SEGMENT} if self.config.packing == "documents" else padding


def tokenizer_faults(path: str) -> list[str]:
    """What is wrong with the tokenizer, or with the chat template, of a Hugging Face model's directory."""
    try:
        load_tokenizer(path)
        load_chat_template(path)
    except ValueError as error:
        return [str(error)]
    return []
