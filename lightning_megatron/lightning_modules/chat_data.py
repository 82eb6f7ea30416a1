"""`ChatDataModule`: conversations, or prompts with completions, for fine-tuning a model on what is to be answered.

As in `GPTDataModule`, one process prepares and all processes then read the same file; the order of samples depends on
the seed and the global batch size alone, and a resumed run goes on after the last sample that was trained on.
"""

from functools import partial
from typing import Any, ClassVar, Literal, get_args

from lightning_megatron.data import (
    ChatSamples,
    ChatTemplate,
    PackedChats,
    Tokenizer,
    collate_padded,
    load_chat_template,
    load_rows,
    load_tokenizer,
    prepare_chats,
    split_documents,
)
from lightning_megatron.data.packed_rows import IGNORE_INDEX, NO_SEGMENT
from lightning_megatron.lightning_modules.data_module import Samples, as_configuration_error
from lightning_megatron.lightning_modules.loaders import Collate
from lightning_megatron.lightning_modules.text_data import TextDataModule

ChatPacking = Literal["none", "documents"]
"""What shares a row: nothing, or samples that do not see each other."""


class ChatDataModule(TextDataModule):
    """Batches of `tokens`, `labels` and `loss_mask`, each [global_batch_size / replicas, s], s the longest sample of
    the batch rounded up to `pad_to_multiple`.

    Rows come from `path` (a table as a file, a directory or a pattern) or `dataset` (a name that `datasets` knows, or a
    local one), and have `messages`, or `prompt` and `completion`, or `text`. Only what is to be answered has labels. A
    sample has at most `sequence_length` tokens; how many were cut or dropped is told. `tokenizer` is the directory of a
    Hugging Face model: its tokenizer.json, and its chat template for messages. With `packing` a row of a batch holds
    several samples, up to `sequence_length`, and the batches have `segments` too, which keeps attention within each:
    `global_batch_size` then counts rows.

    Held out are the rows of `validation_path`, or `validation_fraction` of the others: one is given, and where neither
    is, 0.05 of the rows are held out. `prompts` are what prediction answers: as a user's message where there is a chat
    template, else as text to go on with.
    """

    default_fraction: ClassVar[float] = 0.05

    def __init__(
        self,
        *,
        tokenizer: str,
        sequence_length: int,
        global_batch_size: int,
        path: str | None = None,
        dataset: str | None = None,
        split: str = "train",
        validation_path: str | None = None,
        validation_fraction: float | None = None,
        pad_to_multiple: int = 8,
        packing: ChatPacking = "none",
        prompts: list[str] | None = None,
        num_workers: int = 0,
        seed: int = 0,
        cache_directory: str = "runs/data",
    ) -> None:
        super().__init__(
            vocab_size=0,
            sequence_length=sequence_length,
            global_batch_size=global_batch_size,
            path=path,
            dataset=dataset,
            tokenizer=tokenizer,
            validation_fraction=validation_fraction,
            validation_path=validation_path,
            prompts=prompts,
            num_workers=num_workers,
            seed=seed,
            cache_directory=cache_directory,
        )
        self.split = split
        self.pad_to_multiple = pad_to_multiple
        self.packing = packing
        # There from `setup` on, where the tokenizer has one.
        self.template: ChatTemplate | None = None

    @property
    def hides_padding(self) -> bool:
        """Whether batches have padding that no `segments` tell of."""
        return self.packing == "none"

    def faults(self) -> list[str]:
        faults = super().faults()
        if self.packing not in get_args(ChatPacking):
            choices = ", ".join(map(repr, get_args(ChatPacking)))
            faults.append(f"packing ({self.packing!r}) must be one of {choices}")
        if self.pad_to_multiple < 1:
            faults.append(f"pad_to_multiple ({self.pad_to_multiple}) must be at least 1")
        return faults

    def _tokenizer_faults(self) -> list[str]:
        try:
            load_tokenizer(str(self.tokenizer_path))
            load_chat_template(str(self.tokenizer_path))
        except ValueError as error:
            return [str(error)]
        return []

    def _prepare(self) -> tuple[Samples | None, Samples | None]:
        self.tokenizer = load_tokenizer(str(self.tokenizer_path))
        self.template = load_chat_template(str(self.tokenizer_path))
        if self._only_predicts:
            return None, None
        rows, held_out = self._rows_and_held_out()
        return self._samples(rows, self.tokenizer), None if held_out is None else self._samples(
            held_out, self.tokenizer
        )

    def _rows_and_held_out(self) -> tuple[Any, Any]:
        cache = self._documents_cache
        # A named dataset may lie in the cache of `datasets` already.
        own = cache if self.dataset is None else None
        rows = load_rows(path=self.path, dataset=self.dataset, split=self.split, cache_dir=own)
        if self.validation_path is not None:
            return rows, load_rows(path=self.validation_path, cache_dir=cache)
        return split_documents(rows, self._held_out_fraction) if self._held_out_fraction > 0 else (rows, None)

    def _samples(self, documents: Any, tokenizer: Tokenizer) -> Samples:
        path = prepare_chats(
            documents, tokenizer, self.template, sequence_length=self.sequence_length, directory=self.cache_directory
        )
        samples = ChatSamples(path)
        if self.packing == "none":
            return Samples(dataset=samples, count=len(samples), told=str(samples.kept))
        rows = PackedChats(samples, self.sequence_length, end_of_text=tokenizer.end_of_text, seed=self.seed)
        return Samples(dataset=rows, count=len(rows), told=str(rows))

    @property
    def _collate(self) -> Collate:
        assert self.tokenizer is not None, "setup comes first; Trainer calls it"
        padding = {"tokens": self.tokenizer.end_of_text, "labels": IGNORE_INDEX, "loss_mask": 0}
        if self.packing == "documents":
            padding["segments"] = NO_SEGMENT
        return partial(collate_padded, padding=padding, multiple=self.pad_to_multiple)

    def _prompt_ids(self) -> list[list[int]]:
        if self.template is None:
            return super()._prompt_ids()
        assert self.tokenizer is not None, "setup comes first; Trainer calls it"
        return [ids for ids, _ in self.tokenizer.encode_spelled(self._prompt_texts())]

    def _prompt_texts(self) -> list[str]:
        """What the model is given of each prompt."""
        if self.template is None:
            return self.prompts
        with as_configuration_error():
            asked = [[{"role": "user", "content": prompt}] for prompt in self.prompts]
            return [self.template.render(messages, opens_answer=True) for messages in asked]
