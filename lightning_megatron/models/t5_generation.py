"""Text from a T5: what its decoder writes about texts of different lengths that its encoder reads once.

`generation.generate_rows` is the loop; here are the logits that a T5 gives it.
"""

import torch
from torch import Tensor

from lightning_megatron.context.cache import KeyValueCache
from lightning_megatron.models.generation import generate_rows
from lightning_megatron.models.ragged_rows import row_lengths, slice_rows
from lightning_megatron.models.sampling import GenerationConfig
from lightning_megatron.models.t5 import T5Model
from lightning_megatron.models.t5_decode_state import T5DecodeState


def generate_t5(
    model: T5Model,
    encoder_tokens: Tensor,
    decoder_tokens: Tensor,
    config: GenerationConfig,
    *,
    lengths: Tensor | None = None,
    samples: Tensor | None = None,
) -> list[Tensor]:
    """The decoder's tokens with what the model adds, a tensor [length] for each row; the same on every rank.

    `decoder_tokens` [batch, 1 or more] begin each answer: with the token that starts a text. `encoder_tokens` [batch,
    sequence] are filled up at their ends to one length; `lengths` [batch] says how long they are, where it is not the
    same. `samples` [batch] are the numbers of the rows among all that are generated, which with the seed name the
    draws; from 0 where not given. Raises ValueError for rows without a token, and for answers that may outgrow learned
    positions; RuntimeError in training mode.
    """
    if model.training:
        raise RuntimeError("generate_t5 was called on a model in training mode, which drops; call model.eval() first")
    batch, num_first = decoder_tokens.shape
    limit = model.config.max_decoder_sequence_length
    if model.config.position == "learned" and num_first + config.max_new_tokens - 1 > limit:
        raise ValueError(
            f"max_new_tokens ({config.max_new_tokens}) must be at most {limit + 1 - num_first}: positions are learned, "
            f"max_decoder_sequence_length ({limit}) of them, and an answer begins with {num_first} tokens"
        )
    return generate_rows(
        T5NextLogits(model, encoder_tokens, row_lengths(encoder_tokens, lengths)),
        decoder_tokens,
        row_lengths(decoder_tokens, None),
        config,
        samples_B=torch.arange(batch) if samples is None else samples,
        sharing=(model.mesh.tp, model.mesh.cp),
    )


class T5NextLogits:
    """Next-token logits of rows of a T5's decoder for these texts of its encoder, which are as long as `lengths_B`
    says."""

    def __init__(self, model: T5Model, encoder_tokens: Tensor, lengths_B: Tensor) -> None:
        self._model, self._encoder_tokens = model, encoder_tokens
        is_token = torch.arange(encoder_tokens.shape[1]) < lengths_B.unsqueeze(1)
        self._is_token = is_token.to(encoder_tokens.device)
        num_rows, cp = len(encoder_tokens), model.mesh.cp
        self._own, self._memory = KeyValueCache(num_rows, cp=cp, is_cut=False), KeyValueCache(num_rows, cp=cp)
        self._rows_B = torch.arange(num_rows)
        self._seen_B = torch.zeros(num_rows, dtype=torch.int64)

    def __call__(self, text_BL: Tensor, lengths_B: Tensor) -> Tensor:
        new_B = lengths_B - self._seen_B
        decode_state = T5DecodeState(
            lengths_B=new_B, seen_B=self._seen_B, rows_B=self._rows_B, cache=self._own, memory=self._memory
        )
        tokens_BS = slice_rows(text_BL, self._seen_B, new_B)
        logits_BV: Tensor = self._model(
            self._encoder_tokens, tokens_BS, encoder_padding_mask=self._is_token, decode_state=decode_state
        )
        self._own.close()
        self._memory.close()
        self._seen_B = lengths_B.clone()
        return logits_BV
