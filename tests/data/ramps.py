"""Batches of a ramp, counted one after the other."""

from collections.abc import Iterator

from lightning_megatron.data import BatchRamp


def batches_of(ramp: BatchRamp, num_samples: int) -> Iterator[tuple[int, int]]:
    """First sample and size of each whole global batch of `num_samples`."""
    first = 0
    while first + (size := ramp.size_at(first)) <= num_samples:
        yield first, size
        first += size
