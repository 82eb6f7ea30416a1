"""Gathers of weights that multiply in float8, as the bytes of their cast: half of the message of 16 bits.

    once after each step    amaxes of a rank's parts -> maxima over the shards, and over the axes that cut the weights
    each gather             cast of the shard -> all-gather of the bytes -> decast

Note: a cast of a cast is exact. Scales are powers of two, so that decast numbers are exact in bfloat16 and wider
dtypes. The GEMM casts them by the scale of their own amax, which is the one that they were cast by, or twice that, and
either has all of these numbers. So its product has the bits of weights that were gathered in 16 bits.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.optim.bucket import FlatParams
from lightning_megatron.optim.bucket_layout import Range, own_range
from lightning_megatron.precision.cast import amax_of, cast
from lightning_megatron.precision.scaling import WeightCast


class Float8Gather:
    """Gathers a flat group of weights in float8, as `casts` of its members say, for use in `dtype`."""

    def __init__(self, flat: FlatParams, casts: Sequence[WeightCast], dtype: torch.dtype) -> None:
        self.shards, self.casts, self._dtype = flat.shards, casts, dtype
        self._format = casts[0].scaling.dtype
        # Elements of each tensor that has a scale, and of its part in this rank's shard, counted from the shard's.
        self._tensors: list[Range] = []
        self._own: list[Range] = []
        self._num_elements = flat.layout.num_elements
        shards, length = flat.shards, self._num_elements // flat.shards.size
        for param, start, one in zip(flat.members, flat.layout.starts, casts, strict=True):
            size = param.parameter.numel() // one.num_tensors
            for first in (start + index * size for index in range(one.num_tensors)):
                own = own_range(first, size, self._num_elements, shards.size, shards.rank)
                offset = first - shards.rank * length
                self._tensors.append(Range(first, first + size))
                self._own.append(Range(offset + own.start, offset + own.end))
        self.scales: Tensor | None = None
        """Scale of each tensor, float32 [tensors]; None where ranks have agreed on none since the shards changed."""

    def amaxes(self, shard: Tensor) -> Tensor:
        """Amaxes of this rank's parts of the tensors, float32 [tensors], in its shard [N/d]."""
        x = shard.to(self._dtype)
        return torch.stack([amax_of(x[own.start : own.end]) for own in self._own])

    def start(self, shard: Tensor) -> collectives.Pending:
        """Starts to gather the bytes [N] of all shards, of which `shard` [N/d] is this rank's. Collective over the
        shards."""
        values = torch.empty(self._num_elements, dtype=torch.uint8, device=shard.device)
        collectives.shard_slice(values, self.shards).copy_(self._cast(shard.to(self._dtype)))
        return collectives.all_gather_(values, self.shards, wait=False)

    def decast(self, values: Tensor, gathered: Tensor) -> None:
        """Makes the numbers `gathered` [N] of gathered bytes."""
        self._decast(values, self._tensors, gathered)

    def differs(self, now: Tensor, shard: Tensor) -> Tensor:
        """Whether numbers [N/d] are others than `shard` became where it was gathered, bool []; NaN counts as none."""
        x = shard.to(self._dtype)
        before = self._decast(self._cast(x), self._own, torch.empty_like(x))
        return ((now != before) & ~now.isnan()).any()

    def _cast(self, x: Tensor) -> Tensor:
        assert self.scales is not None
        # Zeros, because gaps between parameters are gathered too.
        values = torch.zeros_like(x, dtype=torch.uint8)
        for own, scale in zip(self._own, self.scales.unbind(), strict=True):
            values[own.start : own.end] = cast(x[own.start : own.end], scale, self._format)
        return values

    def _decast(self, values: Tensor, tensors: Sequence[Range], numbers: Tensor) -> Tensor:
        assert self.scales is not None
        numbers.copy_(values.view(self._format))
        for one, inverse in zip(tensors, self.scales.reciprocal().unbind(), strict=True):
            numbers[one.start : one.end].mul_(inverse)
        return numbers


def agree_on_scales(amaxes: Mapping[Float8Gather, Tensor]) -> None:
    """Sets the scales of weights whose parts on this rank have these amaxes. Collective over their shards, and over the
    axes that cut them: one message each."""
    parts = [(gather.shards, part) for gather, part in amaxes.items()]
    by_gather = zip(amaxes, _largest(parts), strict=True)
    weights = [
        (gather, one, part)
        for gather, whole in by_gather
        for one, part in zip(gather.casts, whole.split([one.num_tensors for one in gather.casts]), strict=True)
    ]
    found: dict[Float8Gather, list[Tensor]] = {gather: [] for gather in amaxes}
    agreed = _largest([(one.axis, part) for _, one, part in weights])
    for (gather, one, _), part in zip(weights, agreed, strict=True):
        found[gather].append(one.scaling.scale_of(part))
    for gather, scales in found.items():
        gather.scales = torch.cat(scales)


def _largest(parts: Sequence[tuple[Axis, Tensor]]) -> list[Tensor]:
    """The maxima of each tensor over its axis."""
    found: dict[int, Tensor] = {}
    for axis in dict.fromkeys(axis for axis, _ in parts):
        indices = [index for index, (other, _) in enumerate(parts) if other == axis]
        joined = collectives.all_reduce(torch.cat([parts[index][1] for index in indices]), axis, "max")
        found |= zip(indices, joined.split([len(parts[index][1]) for index in indices]), strict=True)
    return [found[index] for index in range(len(parts))]
