"""`T5ChatDataModule`: prompts with completions, or conversations, for fine-tuning a T5 on its answers."""

from functools import partial
from typing import Any

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.data import (
    AnswerSamples,
    PackedAnswers,
    Tokenizer,
    collate_padded,
    load_tokenizer,
    prepare_answers,
)
from lightning_megatron.data.collate import Sample
from lightning_megatron.data.packed_rows import IGNORE_INDEX, NO_SEGMENT
from lightning_megatron.lightning_modules.chat_data import ChatDataConfig, ChatDataModule
from lightning_megatron.lightning_modules.data_module import Samples
from lightning_megatron.lightning_modules.loaders import Collate
from lightning_megatron.lightning_modules.t5_data import decoder_starts, ids_to_answer, padding_of


@config_dataclass
class T5ChatDataConfig(ChatDataConfig):
    """Conversations for fine-tuning a T5."""

    decoder_sequence_length: int
    """Most tokens of an answer, with its end; sequence_length are the most of what the encoder reads."""


class T5ChatDataModule(ChatDataModule):
    """Batches of `encoder_tokens` and `encoder_segments` [global_batch_size / dp, s], and of `decoder_tokens`,
    `decoder_segments`, `labels` and `loss_mask`, each [.., t]; s and t are the longest of the batch rounded up to
    `pad_to_multiple`.

    Rows have `messages`, or `prompt` and `completion`. Each answer is a sample: the encoder reads all that comes before
    it, the decoder learns the answer. How many answers were cut, or dropped because the encoder cannot read what comes
    before, is logged. A tokenizer must have padding, which starts the decoder.
    """

    config: T5ChatDataConfig

    def __init__(self, config: T5ChatDataConfig) -> None:
        super().__init__(config)

    @property
    def decoder_sequence_length(self) -> int:
        """Tokens of a decoder's sample."""
        return self.config.decoder_sequence_length

    @property
    def hides_padding(self) -> bool:
        """False: `encoder_segments` and `decoder_segments` mark all padding."""
        return False

    def sample_faults(self) -> list[str]:
        faults = super().sample_faults()
        if self.config.decoder_sequence_length < 1:
            faults.append(f"decoder_sequence_length ({self.config.decoder_sequence_length}) must be at least 1")
        return faults

    def _tokenizer_faults(self) -> list[str]:
        if faults := super()._tokenizer_faults():
            return faults
        try:
            padding_of(load_tokenizer(self.config.tokenizer))
        except ValueError as error:
            return [str(error)]
        return []

    def _samples(self, documents: Any, tokenizer: Tokenizer) -> Samples:
        path = prepare_answers(
            documents,
            tokenizer,
            self.template,
            encoder_length=self.sequence_length,
            decoder_length=self.config.decoder_sequence_length,
            directory=self._cache,
        )
        padding = padding_of(tokenizer)
        samples = AnswerSamples(path, start_token=padding)
        if self.config.packing == "none":
            return Samples(dataset=samples, count=len(samples), summary=str(samples.counts))
        rows = PackedAnswers(
            samples,
            encoder_length=self.sequence_length,
            decoder_length=self.config.decoder_sequence_length,
            padding=padding,
            seed=self.config.seed,
        )
        return Samples(dataset=rows, count=len(rows), summary=str(rows))

    @property
    def _collate(self) -> Collate:
        padding = padding_of(self._ready_tokenizer)
        encoder = {"encoder_tokens": padding, "encoder_segments": NO_SEGMENT}
        decoder = {"decoder_tokens": padding, "decoder_segments": NO_SEGMENT, "labels": IGNORE_INDEX, "loss_mask": 0}
        return partial(_collate_both, encoder=encoder, decoder=decoder, multiple=self.config.pad_to_multiple)

    @property
    def _prompt_entries(self) -> list[Sample]:
        """The `decoder_tokens` [1] that start each answer."""
        return decoder_starts(self._ready_tokenizer) * len(self.config.prompts)

    def _prompt_ids(self) -> list[list[int]]:
        return ids_to_answer(self.config.prompts, self._prompt_texts(), self._ready_tokenizer, self.trainer)


def _collate_both(samples: list[Sample], *, encoder: dict[str, int], decoder: dict[str, int], multiple: int) -> Sample:
    """A batch of the samples, in which the entries of encoder and decoder are each padded to their own width."""
    stacks = [
        collate_padded(
            [{name: sample[name] for name in padding} for sample in samples], padding=padding, multiple=multiple
        )
        for padding in (encoder, decoder)
    ]
    return {**stacks[0], **stacks[1]}
