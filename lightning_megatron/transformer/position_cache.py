"""Positions of a call's tokens in their segments, and the angles that follow; calls of rows as long share them.

They are a function of the lengths, so a step's microbatches would each make the same ones anew, and those in flight
would each hold a copy. Packed documents differ from batch to batch: of them a model keeps nothing but frequencies.

N tokens of each sample of the stream on this rank, R pairs of rotated features.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_megatron.context.context_layout import ContextLayout
from lightning_megatron.transformer import rotary
from lightning_megatron.transformer.config import TransformerConfig

# Lengths of rows that a model keeps: those of two stacks, in training and in validation.
_NUM_KEPT = 4


class Positions(NamedTuple):
    """What a rank's tokens are given by where they stand in their segments."""

    layout: ContextLayout
    positions_1N: Tensor
    """Position of each token in its segment, 0 for padding: int64."""
    cos_1NR: Tensor
    """Cosines of the angles of queries and keys: float64."""
    sin_1NR: Tensor
    tables: dict[torch.dtype, tuple[Tensor, Tensor]]
    """Both in other dtypes, as layers ask for them."""
    flat: dict[int, Tensor]
    """Positions of so many rows, one after the other, as parts of a model ask for them."""


class PositionCache:
    """The positions of calls of a model: made once for rows of a length, and the frequencies once for all."""

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config
        self._kept: dict[object, Positions] = {}
        self._frequencies: dict[torch.device, Tensor] = {}

    def __reduce__(self) -> tuple[type["PositionCache"], tuple[TransformerConfig]]:
        # A copy of a model makes its own.
        return PositionCache, (self.config,)

    def rows(self, key: object, make_layout: Callable[[], ContextLayout], rank: int, device: torch.device) -> Positions:
        """Positions of calls whose rows are segments; `key` says which layout they have."""
        name = key, rank, device
        if name not in self._kept:
            # Before one more is there: memory is that of the lengths in use.
            while len(self._kept) >= _NUM_KEPT:
                del self._kept[next(iter(self._kept))]
            # What inference mode makes no later call could save for its backward.
            with torch.inference_mode(False):
                self._kept[name] = self.of(make_layout(), rank, device)
        return self._kept[name]

    def of(self, layout: ContextLayout, rank: int, device: torch.device) -> Positions:
        """Positions of a rank's tokens in any layout."""
        positions_1N = layout.positions(rank, device, padding=0).unsqueeze(0)
        return Positions(layout, positions_1N, *self.angles(positions_1N), {}, {})

    def angles(self, positions_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position's angles, as `rotary.angles` gives them: float64 [B, N, R] each.

        Where layers with a window rotate otherwise, their pairs follow those of the others: R is twice the width.
        """
        config, device = self.config, positions_BN.device
        if device not in self._frequencies:
            pairs = config.rotary_width
            frequencies_R = rotary.frequencies(pairs, config.rotary_base, config.rope_scaling, device)
            if config.window_rotary_base:
                of_windows_R = rotary.frequencies(pairs, config.window_rotary_base, None, device)
                frequencies_R = torch.cat((frequencies_R, of_windows_R))
            self._frequencies[device] = frequencies_R
        return rotary.angles(positions_BN, self._frequencies[device], config.rope_scaling)
