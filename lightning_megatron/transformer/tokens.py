"""What every layer needs to know of the tokens it works on: their order, positions and random keys.

A model makes one `Tokens` for a call, on every stage alike, from its inputs; hidden states then travel as [T, H] or,
in the sequence-parallel region, [T/sp, H]. The stream is batch-major; T is batch * sequence rounded up to a multiple
of sp, and what is beyond the real tokens is computed by nobody who looks at other tokens, and never counts.

B batch, S sequence, T tokens with padding, R pairs of rotated features.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.comm import rng
from lightning_megatron.mesh import Axis


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The stream of one call; `flat` makes it from [batch, sequence]."""

    batch: int
    # sequences in the stream
    sequence: int
    # tokens of each
    sp: Axis
    # cuts the stream between tensor-parallel regions
    places_S: Tensor
    # int64: place of each token in its sequence, which names its random numbers
    positions_BS: Tensor
    # int64 [batch or 1, sequence]: what position embeddings see
    sample_keys_B: Tensor
    # int64: random key of each sequence
    rotary_cos_BSR: Tensor
    # float64 [batch or 1, sequence, pairs]: of the angles by which queries and keys turn; no pairs, no turn
    rotary_sin_BSR: Tensor

    @property
    def num_real(self) -> int:
        return self.batch * self.sequence

    @property
    def num_tokens(self) -> int:
        """T: the real tokens and the padding behind them."""
        return -(-self.num_real // self.sp.size) * self.sp.size

    @property
    def num_padding(self) -> int:
        return self.num_tokens - self.num_real

    @property
    def device(self) -> torch.device:
        return self.places_S.device

    def flat(self, values_BS: Tensor, padding: int = 0) -> Tensor:
        """One value per token of the stream, `padding` where there is no real token: [T]."""
        values_T = values_BS.expand(self.batch, self.sequence).reshape(-1)
        return F.pad(values_T, (0, self.num_padding), value=padding) if self.num_padding else values_T

    def shard(self, values_T: Tensor) -> Tensor:
        """This rank's part of a stream of values: [T/sp]."""
        length = self.num_tokens // self.sp.size
        return values_T.narrow(0, self.sp.rank * length, length)

    def pad(self, real_TH: Tensor) -> Tensor:
        """The real tokens' rows with zero rows behind them for the padding: [T, ...]."""
        return F.pad(real_TH, (0, 0, 0, self.num_padding)) if self.num_padding else real_TH

    @cached_property
    def masks(self) -> dict[tuple[object, ...], Tensor]:
        """Attention masks that the layers of this call share, by what they are functions of."""
        return {}

    @cached_property
    def keys_BS(self) -> Tensor:
        """A random key for each real token, int64 [B, S]."""
        return rng.bits(self.sample_keys_B.unsqueeze(1), self.places_S)

    @cached_property
    def stream_keys(self) -> Tensor:
        """A random key for each token of the stream: int64 [T]."""
        return self.flat(self.keys_BS)

    @cached_property
    def shard_keys(self) -> Tensor:
        """A random key for each token of this rank's part: int64 [T/sp]."""
        return self.shard(self.stream_keys)
