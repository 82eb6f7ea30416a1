"""`T5ChatDataModule`: prompts with completions, or conversations, for fine-tuning a T5 on what is to be answered."""

from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from lightning_megatron.data import (
    AnswerSamples,
    PackedAnswers,
    Tokenizer,
    collate_padded,
    load_tokenizer,
    prepare_answers,
)
from lightning_megatron.data.packed_rows import IGNORE_INDEX, NO_SEGMENT
from lightning_megatron.lightning_modules.chat_data import ChatDataModule, ChatPacking
from lightning_megatron.lightning_modules.data_module import Samples
from lightning_megatron.lightning_modules.loaders import Collate, Sample
from lightning_megatron.lightning_modules.t5_data import answer_loader, ids_to_answer, longest_prompt, padding_of


class T5ChatDataModule(ChatDataModule):
    """Batches of `encoder_tokens` and `encoder_segments` [global_batch_size / replicas, s], and of `decoder_tokens`,
    `decoder_segments`, `labels` and `loss_mask`, each [.., t]; s and t are the longest of the batch rounded up to
    `pad_to_multiple`.

    Rows are those of ChatDataModule with `messages`, or `prompt` and `completion`. Each answer is a sample: the encoder
    reads all that comes before it, up to `sequence_length` tokens with its end, and the decoder learns the answer, up
    to `decoder_sequence_length`. How many answers were cut, or dropped because what is asked is longer, is told. With
    `packing` a row of a batch holds several samples that do not see each other, in both stacks, up to these lengths;
    `global_batch_size` then counts rows. A tokenizer must have padding, which starts the decoder.

    `prompts` are what prediction answers: as a user's message where there is a chat template, else as they are.
    """

    def __init__(
        self,
        *,
        tokenizer: str,
        sequence_length: int,
        decoder_sequence_length: int,
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
            tokenizer=tokenizer,
            sequence_length=sequence_length,
            global_batch_size=global_batch_size,
            path=path,
            dataset=dataset,
            split=split,
            validation_path=validation_path,
            validation_fraction=validation_fraction,
            pad_to_multiple=pad_to_multiple,
            packing=packing,
            prompts=prompts,
            num_workers=num_workers,
            seed=seed,
            cache_directory=cache_directory,
        )
        self.decoder_sequence_length = decoder_sequence_length

    @property
    def hides_padding(self) -> bool:
        """Never: padding is in no segment."""
        return False

    def sample_faults(self) -> list[str]:
        faults = super().sample_faults()
        if self.decoder_sequence_length < 1:
            faults.append(f"decoder_sequence_length ({self.decoder_sequence_length}) must be at least 1")
        return faults

    def _tokenizer_faults(self) -> list[str]:
        if faults := super()._tokenizer_faults():
            return faults
        try:
            padding_of(load_tokenizer(str(self.tokenizer_path)))
        except ValueError as error:
            return [str(error)]
        return []

    def _samples(self, documents: Any, tokenizer: Tokenizer) -> Samples:
        path = prepare_answers(
            documents,
            tokenizer,
            self.template,
            encoder_length=self.sequence_length,
            decoder_length=self.decoder_sequence_length,
            directory=self.cache_directory,
        )
        padding = padding_of(tokenizer)
        samples = AnswerSamples(path, start_token=padding)
        if self.packing == "none":
            return Samples(dataset=samples, count=len(samples), told=str(samples.kept))
        rows = PackedAnswers(
            samples,
            encoder_length=self.sequence_length,
            decoder_length=self.decoder_sequence_length,
            padding=padding,
            seed=self.seed,
        )
        return Samples(dataset=rows, count=len(rows), told=str(rows))

    @property
    def _collate(self) -> Collate:
        assert self.tokenizer is not None, "setup comes first; Trainer calls it"
        padding = padding_of(self.tokenizer)
        encoder = {"encoder_tokens": padding, "encoder_segments": NO_SEGMENT}
        decoder = {"decoder_tokens": padding, "decoder_segments": NO_SEGMENT, "labels": IGNORE_INDEX, "loss_mask": 0}
        return partial(_collate_both, encoder=encoder, decoder=decoder, multiple=self.pad_to_multiple)

    def predict_dataloader(self) -> DataLoader[Sample]:
        """What the encoder reads, with its end, and `decoder_tokens` [batch, 1] that start each answer."""
        assert self.tokenizer is not None, "setup comes first; Trainer calls it"
        return answer_loader(self._prompt_ids(), self.tokenizer, self.global_batch_size, self._replica)

    def _prompt_ids(self) -> list[list[int]]:
        assert self.tokenizer is not None, "setup comes first; Trainer calls it"
        return ids_to_answer(self.prompts, self._prompt_texts(), self.tokenizer, longest_prompt(self.trainer))


def _collate_both(samples: list[Sample], *, encoder: dict[str, int], decoder: dict[str, int], multiple: int) -> Sample:
    """A batch of two widths: the entries of each stack, filled up with what is said for them."""
    stacks = [
        collate_padded(
            [{name: sample[name] for name in padding} for sample in samples], padding=padding, multiple=multiple
        )
        for padding in (encoder, decoder)
    ]
    return {**stacks[0], **stacks[1]}
