"""Gathers of weights that multiply in float8, as the bytes of their cast: half of the message of 16 bits.

    amax of each part -> maximum over the shards -> scale, agreed over tp -> bytes -> all-gather -> decast

Note: a cast of a cast is exact. Scales are powers of two, so that decast numbers are exact in bfloat16 and wider
dtypes. The GEMM casts them by the scale of their own amax, which is the one that they were cast by, or twice that, and
either has all of these numbers. So its product has the bits of weights that were gathered in 16 bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.optim.bucket import FlatParams
from lightning_megatron.optim.bucket_layout import Range, own_range
from lightning_megatron.precision.cast import amax_of, cast
from lightning_megatron.precision.scaling import WeightCast


class Float8Gather:
    """Gathers a flat group of weights in float8, as `casts` of its members say, for use in `dtype`."""

    def __init__(self, flat: FlatParams, casts: Sequence[WeightCast], dtype: torch.dtype) -> None:
        self._flat, self._casts, self._dtype = flat, casts, dtype
        self._format = casts[0].scaling.dtype
        # Elements of each tensor that has a scale, and of its part in this rank's shard, counted from the shard's.
        self._tensors: list[Range] = []
        self._own: list[Range] = []
        shards, length = flat.shards, flat.layout.num_elements // flat.shards.size
        for param, start, one in zip(flat.members, flat.layout.starts, casts, strict=True):
            size = param.parameter.numel() // one.num_tensors
            for first in (start + index * size for index in range(one.num_tensors)):
                own = own_range(first, size, flat.layout.num_elements, shards.size, shards.rank)
                offset = first - shards.rank * length
                self._tensors.append(Range(first, first + size))
                self._own.append(Range(offset + own.start, offset + own.end))
        # Of each tensor in the last gather, float32.
        self._scales = torch.ones(len(self._tensors), device=flat.device)

    def start(self, shard: Tensor) -> collectives.Pending:
        """Starts to gather the bytes [N] of all shards, of which `shard` [N/d] is this rank's.

        Collective over the shards, and over the axes on which scales are agreed.
        """
        x = shard.to(self._dtype)
        amaxes = torch.stack([amax_of(x[own.start : own.end]) for own in self._own])
        amaxes = collectives.all_reduce(amaxes, self._flat.shards, "max")
        by_param = amaxes.split([one.num_tensors for one in self._casts])
        scales = [one.scaling.scales(own) for one, own in zip(self._casts, by_param, strict=True)]
        self._scales = torch.cat(scales)
        values = torch.empty(self._flat.layout.num_elements, dtype=torch.uint8, device=self._flat.device)
        collectives.shard_slice(values, self._flat.shards).copy_(self._cast(x))
        return collectives.all_gather_(values, self._flat.shards, wait=False)

    def decast(self, values: Tensor, gathered: Tensor) -> None:
        """Makes the numbers `gathered` [N] of gathered bytes."""
        self._decast(values, self._tensors, gathered)

    def rounded(self, shard: Tensor) -> Tensor:
        """The numbers [N/d] that `shard`, unchanged since the last gather, has where it is gathered."""
        x = shard.to(self._dtype)
        return self._decast(self._cast(x), self._own, torch.empty_like(x))

    def _cast(self, x: Tensor) -> Tensor:
        # Zeros, because gaps between parameters are gathered too.
        values = torch.zeros_like(x, dtype=torch.uint8)
        for own, scale in zip(self._own, self._scales.unbind(), strict=True):
            values[own.start : own.end] = cast(x[own.start : own.end], scale, self._format)
        return values

    def _decast(self, values: Tensor, tensors: Sequence[Range], numbers: Tensor) -> Tensor:
        numbers.copy_(values.view(self._format))
        for one, inverse in zip(tensors, self._scales.reciprocal().unbind(), strict=True):
            numbers[one.start : one.end].mul_(inverse)
        return numbers
