"""`BertDataModule`: spans of sentences with hidden words, in their order or swapped."""

from functools import partial
from pathlib import Path
from typing import ClassVar

from lightning_megatron.data import (
    BatchRamp,
    BertSampleConfig,
    BertSpans,
    Masking,
    MegatronCorpus,
    Tokenizer,
    WordStarts,
    load_tokenizer,
    special_tokens,
)
from lightning_megatron.data.document_files import MAX_DOCUMENT_BYTES, BadDocuments
from lightning_megatron.data.special_tokens import Role
from lightning_megatron.lightning_modules.data_module import Samples
from lightning_megatron.lightning_modules.text_data import TextDataModule
from lightning_megatron.lightning_modules.text_sources import BlendSource
from lightning_megatron.trainer.config import ConfigurationError


class BertDataModule(TextDataModule):
    """Batches of `tokens`, `token_types`, `padding_mask`, `labels` and `loss_mask`, each [global_batch_size / replicas,
    sequence_length], and of `sentence_order_labels`, one a row.

    Sources, tokenizer and what is held out are those of TextDataModule; the sequences of token files are sentences, as
    `prepare-data --split-sentences` writes them. A sample is consecutive sentences of one
    document; a share `short_seq_prob` of them is meant to be shorter than fits. Of its tokens the share `mask_prob` is
    to be told, whole words, in runs of up to `max_ngram`. An epoch has every span of sentences once, in an order of
    its own, and parted and masked anew. Without `sentence_order` a sample is one part, its sentences in their order,
    and there are no `sentence_order_labels`.

    A tokenizer must have class, separator, mask and padding, as [CLS], [SEP], [MASK] and [PAD]; one that is trained
    here does. `prompts` have [MASK] where prediction is to fill in a token.
    """

    special_tokens: ClassVar[tuple[str, ...]] = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
    needed_of_tokenizer: ClassVar[str] = "which of them are [CLS], [SEP], [MASK] and [PAD]"
    has_ends: ClassVar[bool] = False
    has_sentences: ClassVar[bool] = True

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
        mask_prob: float = 0.15,
        max_ngram: int = 3,
        short_seq_prob: float = 0.1,
        sentence_order: bool = True,
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
        self.mask_prob = mask_prob
        self.max_ngram = max_ngram
        self.short_seq_prob = short_seq_prob
        self.sentence_order = sentence_order

    def sample_faults(self) -> list[str]:
        faults = super().sample_faults()
        # Which tokens they are changes nothing of what is wrong.
        roles: dict[Role, int] = dict.fromkeys(("class", "separator", "mask", "padding"), 0)
        for make in (partial(self._sample_config, roles), partial(self._masking, roles, (0,), 2)):
            try:
                make()
            except ValueError as error:
                faults += str(error).split("; ")
        return faults

    def _tokenizer_faults(self) -> list[str]:
        faults = super()._tokenizer_faults()
        if self.tokenizer_path is not None:
            try:
                special_tokens(load_tokenizer(self.tokenizer_path))
            except ValueError as error:
                # That it cannot be read has been told.
                faults += [text for text in [str(error)] if text not in faults]
        return faults

    def _token_samples(self, prefix: Path, documents: tuple[int, int] | None, tokenizer: Tokenizer | None) -> Samples:
        assert tokenizer is not None, "a fault says so"
        corpus = MegatronCorpus(prefix, documents)
        roles = special_tokens(tokenizer)
        special = tuple(sorted({*tokenizer.special_ids(), *roles.values()}))
        masking = self._masking(roles, special, tokenizer.vocab_size)
        try:
            spans = BertSpans(corpus, self._sample_config(roles), masking, WordStarts(tokenizer), seed=self.seed)
        except ValueError as error:
            raise ValueError(str(error).replace("is_pair", "sentence_order")) from error
        return Samples(dataset=spans, count=len(spans), is_new_each_epoch=True)

    def _sample_config(self, roles: dict[Role, int]) -> BertSampleConfig:
        return BertSampleConfig(
            sequence_length=self.sequence_length,
            class_token=roles["class"],
            separator_token=roles["separator"],
            padding_token=roles["padding"],
            short_seq_prob=self.short_seq_prob,
            is_pair=self.sentence_order,
        )

    def _masking(self, roles: dict[Role, int], special: tuple[int, ...], vocab_size: int) -> Masking:
        return Masking(
            vocab_size=vocab_size,
            mask_token=roles["mask"],
            special_tokens=special,
            mask_prob=self.mask_prob,
            max_ngram=self.max_ngram,
        )

    def _prompt_ids(self) -> list[list[int]]:
        """The tokens of the prompts, as a sample of one part has them. Raises ConfigurationError for what has no gap or
        is too long."""
        assert self.tokenizer is not None, "setup comes first; Trainer calls it"
        roles = special_tokens(self.tokenizer)
        mask = self.tokenizer.pieces()[roles["mask"]]
        found, faults = [], []
        for prompt, (ids, _) in zip(self.prompts, self.tokenizer.encode_spelled(self.prompts), strict=True):
            found.append([roles["class"], *ids, roles["separator"]])
            if roles["mask"] not in ids:
                faults.append(f"prompt ({prompt!r}) has no {mask}; put one where a token is to be filled in")
            if len(found[-1]) > self.sequence_length:
                faults.append(
                    f"prompt ({prompt!r}) has {len(found[-1])} tokens with its special ones, and sequence_length "
                    f"({self.sequence_length}) is the most; shorten it"
                )
        if faults:
            raise ConfigurationError(faults)
        return found
