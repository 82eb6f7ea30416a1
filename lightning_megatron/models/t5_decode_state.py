"""State of a T5's call that gives logits of the next token of each row of the decoder, with cached keys and values.

    call 1         the encoder runs; each decoder layer caches keys and values of its output (`memory`), and of the own
                   first tokens
    calls 2, ...   the decoder's new tokens alone

Every rank of cp works on all of the decoder's tokens: there are few. The encoder is cut over cp as in training, its
rows without their padding in one row; a rank caches the tokens that it computed.

B samples, N tokens of this rank's part of the encoder's stream, C columns that this rank caches.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_megatron.context.cache import KeyValueCache
from lightning_megatron.context.context_layout import PADDING
from lightning_megatron.context.documents import Documents
from lightning_megatron.transformer.cross_attention import CachedEncoderMemory
from lightning_megatron.transformer.decode_state import DecodeState
from lightning_megatron.transformer.tokens import Tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class T5DecodeState(DecodeState):
    """State of a T5's generation: with it a call gives logits [B, V] of what follows each row of the decoder's tokens.

    Of its `cache`, that of self-attention, no call is cut over cp.
    """

    memory: KeyValueCache
    """Keys and values of the encoder's tokens, for cross attention."""


def cached_memory(
    decode_state: T5DecodeState, decoder: Tokens, encoder: Tokens | None, documents: Documents | None
) -> CachedEncoderMemory:
    """Cache of cross attention for a call: filled from the encoder's stream, or, without an `encoder`, read."""
    assert decoder.past is not None
    queries_BN = decoder.past.query_positions_BN
    if encoder is None or documents is None:
        return CachedEncoderMemory(decode_state.memory.read(decode_state.rows, queries_BN), queries_BN.new_empty(0))
    own_BC, positions_BC = _by_sample(encoder, documents)
    call = decode_state.memory.open(decode_state.rows, positions_BC)
    return CachedEncoderMemory(replace(call, query_positions_BN=queries_BN, seen={}), own_BC)


def _by_sample(encoder: Tokens, documents: Documents) -> tuple[Tensor, Tensor]:
    """Index of each sample's tokens in this rank's stream, and their positions: [B, C] each, -1 for none."""
    batch, sequence = encoder.shape
    places_N = encoder.layout.places(encoder.context.rank).to(encoder.device)
    own = torch.nonzero(places_N != PADDING).flatten()
    samples, positions = documents.rows_X[places_N[own]], documents.positions_X[places_N[own]]
    # They come sample after sample.
    columns = torch.arange(len(own), device=encoder.device) - torch.searchsorted(samples, samples)
    # As many for any samples of this width: microbatches cache theirs side by side.
    shape = (batch, -(-sequence // encoder.layout.ring_size))
    own_BC, positions_BC = (torch.full(shape, PADDING, device=encoder.device) for _ in range(2))
    own_BC[samples, columns], positions_BC[samples, columns] = own, positions
    return own_BC, positions_BC
