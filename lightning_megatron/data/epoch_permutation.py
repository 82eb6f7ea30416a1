"""Endless epochs of samples, each a random permutation that is computed item by item.

Between samples and the loader, where sources are blended or batches grow. Sample i is a function of i: pass after pass
over each source, each pass in its own random order. So one number, the samples consumed by all data-parallel ranks, is
the position in the data, and a run that is made longer goes on as if it had always been that long.

The random order of a pass is a Feistel network over the numbers of its samples, a bijection of 2^b numbers that is
walked until it meets one in range. The position of a sample is computed from its number alone: no order is stored.
Source: Black and Rogaway 2002, section 4.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Dataset, DistributedSampler

from lightning_megatron.comm.rng import key
from lightning_megatron.data.batch_ramp import BatchRamp
from lightning_megatron.data.blend import Blend

_NUM_ROUNDS = 6
_MASK = (1 << 64) - 1


@dataclass(eq=False)
class ShuffledEpochs(Dataset[Any]):
    """`count` samples epoch after epoch: number n is of epoch n // count, which has its own permutation.

    With `is_ordered` each pass has the order of the samples. Of samples that are new in each pass number i of pass p
    has the index p * count + i.
    """

    samples: Dataset[Any]
    count: int
    seed: int = field(kw_only=True)
    is_ordered: bool = field(default=False, kw_only=True)
    is_new_each_epoch: bool = field(default=False, kw_only=True)

    def __getitem__(self, number: int) -> Any:
        first = number // self.count * self.count if self.is_new_each_epoch else 0
        return self.samples[first + self.position(number)]

    def position(self, number: int) -> int:
        """The index of the sample that comes as number n."""
        turn, position = divmod(number, self.count)
        return position if self.is_ordered else shuffled(position, self.count, key(self.seed, "pass", turn))


class BlendedEpochs(Dataset[Any]):
    """Endless samples of several sources in the order of a `Blend`, each source with its own permutations."""

    def __init__(self, sources: Sequence[ShuffledEpochs], weights: Sequence[float]) -> None:
        self.sources = list(sources)
        self.blend = Blend(weights)

    def __getitem__(self, number: int) -> Any:
        source, number_of_source = self.blend.locate(number)
        return self.sources[source][number_of_source]


class InfiniteSampler(DistributedSampler[list[int]]):
    """The sample numbers of this data-parallel rank in each global batch of endless samples.

    Data-parallel rank r takes the part [r*B/dp, (r+1)*B/dp) of a batch of B, whose size is that of the ramp. A round is
    `num_batches` batches from `consumed_samples` on. Whoever runs the loop adds each batch's size to that number: the
    sampler cannot, because a loader's workers read ahead of training. Lightning leaves a sampler of this base class as
    it is.
    """

    def __init__(self, ramp: BatchRamp, num_batches: int, *, num_replicas: int, rank: int) -> None:
        ramp.require_shared(num_replicas)
        super().__init__(range(num_batches), num_replicas=num_replicas, rank=rank, shuffle=False)  # type: ignore[arg-type]
        self.ramp = ramp
        self.num_batches = num_batches
        self.consumed_samples = 0

    def __iter__(self) -> Iterator[list[int]]:
        first = self.consumed_samples
        for _ in range(self.num_batches):
            size = self.ramp.size_at(first)
            share = size // self.num_replicas
            yield list(range(first + self.rank * share, first + (self.rank + 1) * share))
            first += size

    def __len__(self) -> int:
        return self.num_batches

    @property
    def next_size(self) -> int:
        """Samples of the global batch that comes next."""
        return self.ramp.size_at(self.consumed_samples)


def shuffled(position: int, count: int, seed: int) -> int:
    """The image of `position` under the permutation of `count` numbers that belongs to a seed."""
    low_bits = max(count - 1, 1).bit_length() // 2
    high_bits = max(count - 1, 1).bit_length() - low_bits
    while True:
        high, low = position >> low_bits, position & ((1 << low_bits) - 1)
        for number in range(_NUM_ROUNDS):
            # The high and the low bits change each other in turn.
            if number % 2:
                low ^= _mixed(high, seed, number) & ((1 << low_bits) - 1)
            else:
                high ^= _mixed(low, seed, number) & ((1 << high_bits) - 1)
        position = high << low_bits | low
        if position < count:
            return position


def _mixed(value: int, seed: int, number: int) -> int:
    """64 bits of a value. Source: the finaliser of splitmix64, Steele et al. 2014."""
    x = (value * 0x9E3779B97F4A7C15 + seed + number * 0xD1B54A32D192ED03) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
