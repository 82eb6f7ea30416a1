"""State of a model call that gives logits of the next token of each row, and the stream that it works on.

The first call of a cache is an ordinary one, cut over cp, whose attention layers also cache their keys and values.
Every later one works on new tokens alone, which all ranks of cp have: there are too few to share. Each row continues
from its own position.

B rows, S tokens of a row in this call, T tokens of the stream, H hidden.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.comm.rng import Draws
from lightning_megatron.context.cache import KeyValueCache
from lightning_megatron.context.context_layout import PADDING
from lightning_megatron.mesh import Mesh
from lightning_megatron.transformer.position_cache import PositionCache
from lightning_megatron.transformer.tokens import Tokens, unsplit_stream


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeState:
    """State of generation that a call gets in order to return logits [B, V] of what follows each row. A batch of rows
    may be cut into microbatches, this with it.

    Of a row of no token in this call the logits mean nothing.
    """

    lengths_B: Tensor
    """Number of tokens of each row in this call, int64 on the host; those after them are padding."""
    seen_B: Tensor
    """Number of tokens of each row that the cache has already, int64 on the host."""
    rows_B: Tensor
    """Index of each row in the cache, one after the other, int64 on the host."""
    cache: KeyValueCache | None
    """Keys and values of earlier calls; none: the call has all tokens of each row, and caches nothing."""

    @property
    def extends(self) -> bool:
        """Whether calls before this one had the beginnings of the rows."""
        return self.cache is not None and not self.cache.is_empty

    @property
    def rows(self) -> slice:
        first = int(self.rows_B[0])
        return slice(first, first + len(self.rows_B))

    def positions_BS(self, num_tokens: int) -> Tensor:
        """Position of each token in its row, -1 for padding: int64 [B, S]."""
        index_S = torch.arange(num_tokens)
        return torch.where(index_S < self.lengths_B.unsqueeze(1), index_S + self.seen_B.unsqueeze(1), PADDING)


def caching_stream(tokens: Tokens, decode_state: DecodeState) -> Tokens:
    """The stream of an ordinary call whose keys and values are cached."""
    assert decode_state.cache is not None and not tokens.is_packed, "rows are cached as they are, not packed"
    places_N = tokens.layout.places(tokens.context.rank)
    is_token_BN = (places_N != PADDING) & (places_N < decode_state.lengths_B.unsqueeze(1))
    positions_BN = torch.where(is_token_BN, places_N, PADDING).to(tokens.device)
    return replace(tokens, past=decode_state.cache.open(decode_state.rows, positions_BN))


def decode_stream(
    decode_state: DecodeState,
    num_tokens: int,
    *,
    positions: PositionCache,
    mesh: Mesh,
    draws: Draws,
    device: torch.device,
) -> Tokens:
    """The stream of a call that extends what the cache has: each rank of cp works on all of it."""
    assert decode_state.cache is not None
    positions_BS = decode_state.positions_BS(num_tokens).to(device)
    places_BN = positions_BS.clamp(min=0)
    cos_BNR, sin_BNR = positions.angles(places_BN)
    shape = (len(decode_state.rows_B), num_tokens)
    return replace(
        unsplit_stream(mesh, shape, places_BN, partial(_row_keys, shape, replace(draws), device), cos_BNR, sin_BNR),
        past=decode_state.cache.open(decode_state.rows, positions_BS),
    )


def _row_keys(shape: tuple[int, int], draws: Draws, device: torch.device) -> Tensor:
    """The key of its row for each token: [B, S]."""
    return draws.sample_keys(shape[0], device).unsqueeze(1).expand(shape)


def last_tokens(hidden_TH: Tensor, tokens: Tokens, lengths_B: Tensor) -> Tensor:
    """The hidden states [T/sp, H] of each row's last token, as a stream of B tokens: [B rounded up to sp / sp, H]."""
    batch, sequence = tokens.shape
    numbers_BS = torch.where(
        torch.arange(sequence) == lengths_B.unsqueeze(1) - 1, torch.arange(1, batch + 1).unsqueeze(1), 0
    )
    numbers_T = tokens.shard(tokens.flat(numbers_BS.to(hidden_TH.device)))
    # All others are written to row 0, which nobody reads.
    num_rows = -(-batch // tokens.sp.size) * tokens.sp.size
    picked_BH = hidden_TH.new_zeros(1 + num_rows, hidden_TH.shape[1]).index_copy(0, numbers_T, hidden_TH)[1:]
    # Each row is one rank's, and zeros on the others.
    return collectives.reduce_scatter(collectives.all_reduce(picked_BH, tokens.cp), tokens.sp)
