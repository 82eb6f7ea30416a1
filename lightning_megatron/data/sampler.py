"""Samplers that give each data-parallel rank its samples, so that global batches are alike on every layout.

Between packed samples and collation. Epoch e has one order of all samples, a permutation that depends on (seed, e)
alone. Of B samples in a global batch, batch k is order[k*B : (k+1)*B], and data-parallel rank r takes its part
[r*B/dp, (r+1)*B/dp). One number, the samples consumed by all of them, is the position in the data on any dp size.
"""

import hashlib
from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import Dataset, DistributedSampler


class GlobalBatchSampler(DistributedSampler[int]):
    """Indices of this data-parallel rank's samples, global batch after global batch.

    Lightning leaves a sampler of this base class as it is. A loader that takes `num_replica_samples` at a time (or a
    divisor of it, to accumulate gradients) sees one global batch a step. Whoever runs the loop adds to
    `consumed_samples` after each step: the sampler cannot, because a loader's workers read ahead of training.

    With `drop_last` the samples past the last full batch are left out of the epoch; without it the last batch is
    filled up from the start of the order.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        global_batch_size: int,
        num_replicas: int,
        rank: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> None:
        _check(len(dataset), global_batch_size, num_replicas, drop_last)
        super().__init__(
            cast(Dataset[int], dataset),
            num_replicas=num_replicas,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        self.global_batch_size = global_batch_size
        self.num_dataset_samples = len(dataset)
        num_batches = self.num_dataset_samples // global_batch_size
        if not drop_last and self.num_dataset_samples % global_batch_size:
            num_batches += 1
        # The base class's names: samples of an epoch for all data-parallel ranks, and for one.
        self.total_size = num_batches * global_batch_size
        self.num_samples = self.total_size // num_replicas
        self.consumed_samples = 0

    @property
    def num_replica_samples(self) -> int:
        """Samples of a global batch that one data-parallel rank takes."""
        return self.global_batch_size // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """The rest of the epoch: all of it, unless `consumed_samples` lies inside it."""
        order = self.epoch_order(self.epoch)
        start = self.consumed_samples - self.epoch * self.total_size
        if not 0 <= start < self.total_size:
            start = 0
        first = self.rank * self.num_replica_samples
        for batch in range(start, self.total_size - self.global_batch_size + 1, self.global_batch_size):
            yield from order[batch + first : batch + first + self.num_replica_samples].tolist()

    def __len__(self) -> int:
        """Samples of a full epoch for this data-parallel rank, also when it is resumed in its midst."""
        return self.num_samples

    def epoch_order(self, epoch: int) -> torch.Tensor:
        """The samples of all global batches of an epoch: [total_size]."""
        if self.shuffle:
            # Hashed, since seed + epoch would give epoch 1 of seed 0 the order of epoch 0 of seed 1.
            digest = hashlib.sha256(f"{self.seed} {epoch}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            order = torch.randperm(self.num_dataset_samples, generator=generator)
        else:
            order = torch.arange(self.num_dataset_samples)
        num_copies = -(-self.total_size // self.num_dataset_samples)
        return order.repeat(num_copies)[: self.total_size]

    def state_dict(self) -> dict[str, Any]:
        return {"consumed_samples": self.consumed_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes after the consumed samples, in their epoch, whatever dp size wrote the state."""
        consumed_samples = int(state["consumed_samples"])
        if consumed_samples < 0:
            raise ValueError(f"consumed_samples ({consumed_samples}) must not be negative; 0 starts from the beginning")
        self.consumed_samples = consumed_samples
        self.epoch = consumed_samples // self.total_size


class EpochSampler(GlobalBatchSampler):
    """GlobalBatchSampler for samples that are new in every epoch: sample i of epoch e has the index e * samples + i, so
    each index comes once in a run."""

    def epoch_order(self, epoch: int) -> torch.Tensor:
        return super().epoch_order(epoch) + epoch * self.num_dataset_samples


def _check(num_samples: int, global_batch_size: int, num_replicas: int, drop_last: bool) -> None:
    if num_replicas < 1:
        raise ValueError(f"num_replicas ({num_replicas}) must be at least 1")
    if global_batch_size < 1 or global_batch_size % num_replicas:
        below = global_batch_size // num_replicas * num_replicas
        fits = " or ".join(str(size) for size in (below, below + num_replicas) if size > 0)
        raise ValueError(
            f"global_batch_size ({global_batch_size}) must be a positive multiple of the data-parallel size"
            f" ({num_replicas}); {fits} would do"
        )
    if num_samples < 1 or (drop_last and num_samples < global_batch_size):
        raise ValueError(
            f"the dataset's samples ({num_samples}) are too few for one global batch of global_batch_size"
            f" ({global_batch_size}); give more text, a shorter sequence_length or a smaller global_batch_size"
        )
