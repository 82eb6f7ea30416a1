"""`ChatDataModule`: conversations, or prompts with completions, for fine-tuning a model on its answers."""

from functools import partial
from typing import Any, ClassVar

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.data import (
    ChatSamples,
    ChatTemplate,
    PackedChats,
    Tokenizer,
    collate_padded,
    load_chat_template,
    load_tokenizer,
    prepare_chats,
)
from lightning_megatron.lightning_modules.conversation_data import (
    ConversationDataConfig,
    ConversationDataModule,
    tokenizer_faults,
)
from lightning_megatron.lightning_modules.data_module import Samples, as_configuration_error
from lightning_megatron.lightning_modules.loaders import Collate


@config_dataclass
class ChatDataConfig(ConversationDataConfig):
    """Conversations for fine-tuning."""

    tokenizer: str
    """Directory of the Hugging Face model: its tokenizer, and its chat template for rows of messages."""


class ChatDataModule(ConversationDataModule):
    """Batches of `tokens`, `labels` and `loss_mask`, each [global_batch_size / dp, s], s the longest sample of the
    batch rounded up to `pad_to_multiple`, and with packing of `segments`.

    Rows have `messages`, or `prompt` and `completion`, or `text`. Answers alone have labels. How many samples were cut
    to `sequence_length`, and how many rows dropped, is logged. Prompts are a user's message where there is a chat
    template, else text to complete.
    """

    config: ChatDataConfig
    default_fraction: ClassVar[float] = 0.05

    def __init__(self, config: ChatDataConfig) -> None:
        super().__init__(config)
        # The chat template of the model's directory, from `setup` on; None where it has none.
        self.template: ChatTemplate | None = None

    def _tokenizer_faults(self) -> list[str]:
        return tokenizer_faults(self.config.tokenizer)

    def _prepare(self) -> tuple[Samples | None, Samples | None]:
        self.tokenizer = load_tokenizer(self.config.tokenizer)
        self.template = load_chat_template(self.config.tokenizer)
        if self._only_predicts:
            return None, None
        training, held_out = self._split_rows(self._rows())
        own = self.tokenizer
        return self._samples(training, own), None if held_out is None else self._samples(held_out, own)

    def _samples(self, documents: Any, tokenizer: Tokenizer) -> Samples:
        path = prepare_chats(
            documents, tokenizer, self.template, sequence_length=self.sequence_length, directory=self._cache
        )
        samples = ChatSamples(path)
        if self.config.packing == "none":
            return Samples(dataset=samples, count=len(samples), summary=str(samples.counts))
        rows = PackedChats(samples, self.sequence_length, end_of_text=tokenizer.end_of_text, seed=self.config.seed)
        return Samples(dataset=rows, count=len(rows), summary=str(rows))

    @property
    def _collate(self) -> Collate:
        padding = self._padding(self._ready_tokenizer)
        return partial(collate_padded, padding=padding, multiple=self.config.pad_to_multiple)

    def _prompt_ids(self) -> list[list[int]]:
        if self.template is None:
            return super()._prompt_ids()
        return [ids for ids, _ in self._ready_tokenizer.encode_spelled(self._prompt_texts())]

    def _prompt_texts(self) -> list[str]:
        """The text that the model reads for each prompt."""
        if self.template is None:
            return self.config.prompts
        with as_configuration_error():
            chats = [[{"role": "user", "content": prompt}] for prompt in self.config.prompts]
            return [self.template.render(messages, opens_answer=True) for messages in chats]
