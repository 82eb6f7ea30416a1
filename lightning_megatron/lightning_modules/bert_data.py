"""`BertDataModule`: spans of sentences with masked words, in their order or swapped."""

from functools import partial
from pathlib import Path
from typing import ClassVar

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.data import (
    BertSampleConfig,
    BertSpans,
    Masking,
    MegatronCorpus,
    Tokenizer,
    WordStarts,
    load_tokenizer,
    special_tokens,
)
from lightning_megatron.data.token_roles import Role
from lightning_megatron.lightning_modules.corpus_data import CorpusDataConfig, CorpusDataModule
from lightning_megatron.lightning_modules.data_module import Samples
from lightning_megatron.trainer.config import ConfigurationError


@config_dataclass
class BertDataConfig(CorpusDataConfig):
    """Text for masked language modelling and sentence order, and how much of it is masked."""

    mask_prob: float = 0.15
    """Fraction of the tokens that are masked and predicted, by whole words."""
    max_ngram: int = 3
    """Most words that are masked in a row; a run of n words is drawn in proportion to 1/n."""
    short_seq_prob: float = 0.1
    """Fraction of the samples that are made shorter than sequence_length on purpose."""
    sentence_order: bool = True
    """Whether a sample has two parts, half of the time swapped, for the sentence-order head; else it is one part."""


class BertDataModule(CorpusDataModule):
    """Batches of `tokens`, `token_types`, `padding_mask`, `labels` and `loss_mask`, each [global_batch_size / dp,
    sequence_length], and with `sentence_order` of `sentence_order_labels` [global_batch_size / dp].

    The sequences of token files are sentences, as `prepare-data --split-sentences` writes them. A sample is consecutive
    sentences of one document. An epoch has every span of sentences once, in its own order, split and masked at random
    in each epoch. A tokenizer must have the tokens [CLS], [SEP], [MASK] and [PAD]; one that is trained here does.
    Prompts have [MASK] where prediction fills in a token.
    """

    config: BertDataConfig
    special_tokens: ClassVar[tuple[str, ...]] = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
    needed_of_tokenizer: ClassVar[str] = "which of them are [CLS], [SEP], [MASK] and [PAD]"
    has_ends: ClassVar[bool] = False
    has_sentences: ClassVar[bool] = True

    def __init__(self, config: BertDataConfig) -> None:
        super().__init__(config)

    def sample_faults(self) -> list[str]:
        faults = super().sample_faults()
        # Any ids do: the faults do not depend on them.
        roles: dict[Role, int] = dict.fromkeys(("class", "separator", "mask", "padding"), 0)
        for make in (partial(self._sample_config, roles), partial(self._masking, roles, (0,), 2)):
            try:
                make()
            except ValueError as error:
                faults += str(error).split("; ")
        return faults

    def _tokenizer_faults(self) -> list[str]:
        faults = super()._tokenizer_faults()
        if self.config.tokenizer is not None:
            try:
                special_tokens(load_tokenizer(self.config.tokenizer))
            except ValueError as error:
                # A file that cannot be read is a fault already.
                faults += [text for text in [str(error)] if text not in faults]
        return faults

    def _token_samples(self, prefix: Path, documents: tuple[int, int] | None, tokenizer: Tokenizer | None) -> Samples:
        assert tokenizer is not None, "a fault says so"
        corpus = MegatronCorpus(prefix, documents)
        roles = special_tokens(tokenizer)
        special = tuple(sorted({*tokenizer.special_ids(), *roles.values()}))
        masking = self._masking(roles, special, tokenizer.vocab_size)
        try:
            spans = BertSpans(corpus, self._sample_config(roles), masking, WordStarts(tokenizer), seed=self.config.seed)
        except ValueError as error:
            raise ValueError(str(error).replace("is_pair", "sentence_order")) from error
        return Samples(dataset=spans, count=len(spans), is_new_each_epoch=True)

    def _sample_config(self, roles: dict[Role, int]) -> BertSampleConfig:
        return BertSampleConfig(
            sequence_length=self.sequence_length,
            class_token=roles["class"],
            separator_token=roles["separator"],
            padding_token=roles["padding"],
            short_seq_prob=self.config.short_seq_prob,
            is_pair=self.config.sentence_order,
        )

    def _masking(self, roles: dict[Role, int], special: tuple[int, ...], vocab_size: int) -> Masking:
        return Masking(
            vocab_size=vocab_size,
            mask_token=roles["mask"],
            special_tokens=special,
            mask_prob=self.config.mask_prob,
            max_ngram=self.config.max_ngram,
        )

    def _prompt_ids(self) -> list[list[int]]:
        """The tokens of each prompt, as a sample of one part has them. Raises ConfigurationError for a prompt without
        a mask token or too long."""
        tokenizer = self._ready_tokenizer
        roles = special_tokens(tokenizer)
        mask = tokenizer.pieces()[roles["mask"]]
        found, faults = [], []
        encoded = tokenizer.encode_spelled(self.config.prompts)
        for prompt, (ids, _) in zip(self.config.prompts, encoded, strict=True):
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
