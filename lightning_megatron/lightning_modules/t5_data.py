"""`T5DataModule`: pieces of text with masked spans, which a T5 predicts."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.data import (
    MegatronCorpus,
    SpanCorruption,
    T5Pieces,
    Tokenizer,
    load_tokenizer,
    sentinels,
    special_tokens,
)
from lightning_megatron.data.collate import Sample
from lightning_megatron.data.token_roles import SENTINEL
from lightning_megatron.lightning_modules.corpus_data import CorpusDataConfig, CorpusDataModule
from lightning_megatron.lightning_modules.data_module import Samples
from lightning_megatron.lightning_modules.t5 import T5Module
from lightning_megatron.trainer.config import ConfigurationError

_PADDING = "<pad>"


@config_dataclass
class T5DataConfig(CorpusDataConfig):
    """Text for span corruption: spans masked for the encoder, predicted by the decoder."""

    decoder_sequence_length: int
    """Tokens of a decoder's sample; sequence_length are those of the encoder's."""
    mask_prob: float = 0.15
    """Fraction of the tokens that are masked."""
    span_stop_prob: float = 0.2
    """Probability that a masked span ends after each of its tokens: spans of about 1 / span_stop_prob tokens."""
    max_span_length: int = 10
    """Most tokens of a masked span."""


class T5DataModule(CorpusDataModule):
    """Batches of `encoder_tokens` and `encoder_segments` [global_batch_size / dp, sequence_length], and of
    `decoder_tokens`, `decoder_segments`, `labels` and `loss_mask`, each [.., decoder_sequence_length].

    Each document is cut into pieces. An epoch has every piece once, in an order of its own and with other spans. Token
    files should have no ends of text: each sample gets its own. A tokenizer must have padding, which starts the
    decoder, and sentinels; one that is trained here has 100.

    Prompts are what the encoder reads in prediction, with sentinels `<extra_id_0>` and on for gaps; those without are
    warned of. They may be longer than `sequence_length`, up to the learned positions of the model.
    """

    config: T5DataConfig
    special_tokens: ClassVar[tuple[str, ...]] = (_PADDING, *(SENTINEL.format(i) for i in range(100)))
    needed_of_tokenizer: ClassVar[str] = "which of them are padding and sentinels"
    # The encoder's and the decoder's text of a sample each get an end of their own.
    has_ends: ClassVar[bool] = False

    def __init__(self, config: T5DataConfig) -> None:
        super().__init__(config)

    @property
    def decoder_sequence_length(self) -> int:
        """Tokens of a decoder's sample."""
        return self.config.decoder_sequence_length

    def sample_faults(self) -> list[str]:
        faults = super().sample_faults()
        try:
            # Any ids do: the faults do not depend on them.
            self._corruption((2,), padding=0, end=1)
        except ValueError as error:
            found = str(error).replace("encoder_length", "sequence_length")
            faults += found.replace("decoder_length", "decoder_sequence_length").split("; ")
        return faults

    def setup(self, stage: str) -> None:
        super().setup(stage)
        gap = SENTINEL.format(0)
        # Validation and test ask nothing.
        if stage in ("fit", "predict") and (whole := [prompt for prompt in self.config.prompts if gap not in prompt]):
            # A model that knows tasks too may be asked in words.
            rank_zero_warn(
                f"{len(whole)} of {len(self.config.prompts)} prompts, the first of them {whole[0][:60]!r}, have no "
                f"gap, and this data teaches to fill gaps alone; write {gap} where text is missing, as in 'import{gap}'"
            )

    def _corruption(self, named: tuple[int, ...], *, padding: int, end: int) -> SpanCorruption:
        return SpanCorruption(
            sentinels=named,
            start_token=padding,
            end_token=end,
            padding_token=padding,
            encoder_length=self.sequence_length,
            decoder_length=self.config.decoder_sequence_length,
            mask_prob=self.config.mask_prob,
            span_stop_prob=self.config.span_stop_prob,
            max_span_length=self.config.max_span_length,
        )

    def _tokenizer_faults(self) -> list[str]:
        faults = super()._tokenizer_faults()
        if faults or self.config.tokenizer is None:
            return faults
        tokenizer = load_tokenizer(self.config.tokenizer)
        for look in (padding_of, sentinels):
            try:
                look(tokenizer)
            except ValueError as error:
                faults.append(str(error))
        return faults

    def _token_samples(self, prefix: Path, documents: tuple[int, int] | None, tokenizer: Tokenizer | None) -> Samples:
        assert tokenizer is not None, "a fault says so"
        corruption = self._corruption(sentinels(tokenizer), padding=padding_of(tokenizer), end=tokenizer.end_of_text)
        pieces = T5Pieces(MegatronCorpus(prefix, documents), corruption, seed=self.config.seed)
        return Samples(dataset=pieces, count=len(pieces), is_new_each_epoch=True)

    @property
    def _prompt_entries(self) -> list[Sample]:
        """The `decoder_tokens` [1] that start each answer."""
        return decoder_starts(self._ready_tokenizer) * len(self.config.prompts)

    def _prompt_ids(self) -> list[list[int]]:
        return ids_to_answer(self.config.prompts, self.config.prompts, self._ready_tokenizer, self.trainer)


def padding_of(tokenizer: Tokenizer) -> int:
    """The padding token, which also starts a T5's decoder."""
    return special_tokens(tokenizer, ("padding",))["padding"]


def _longest_prompt(trainer: L.Trainer | None) -> int | None:
    """Most tokens that the encoder of a Trainer's T5 can read; None without a T5 or with relative positions, which
    have no bound."""
    module = None if trainer is None else trainer.lightning_module
    if not isinstance(module, T5Module) or module.config.position != "learned":
        return None
    return module.config.max_sequence_length


def ids_to_answer(
    prompts: Sequence[str], texts: Sequence[str], tokenizer: Tokenizer, trainer: L.Trainer | None
) -> list[list[int]]:
    """The encoder's tokens of each prompt's text, with their end. Raises ConfigurationError for a prompt that is longer
    than the encoder can read."""
    end, longest = [tokenizer.end_of_text], _longest_prompt(trainer)
    found = [ids if ids[-1:] == end else ids + end for ids, _ in tokenizer.encode_spelled(texts)]
    faults = [
        f"prompt ({prompt!r}) has {len(ids)} tokens with its end, and max_sequence_length ({longest}) of the model is"
        " the most, because its positions are learned; shorten it"
        for prompt, ids in zip(prompts, found, strict=True)
        if longest is not None and len(ids) > longest
    ]
    if faults:
        raise ConfigurationError(faults)
    return found


def decoder_starts(tokenizer: Tokenizer) -> list[Sample]:
    """The entry `decoder_tokens` [1] that starts one answer."""
    return [{"decoder_tokens": torch.tensor([padding_of(tokenizer)])}]
