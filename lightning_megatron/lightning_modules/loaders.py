"""Loaders that give each replica its part of every global batch, and that a checkpoint can resume on any layout.

Between the samplers of `data/` and Lightning's loops.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_megatron.data import GlobalBatchSampler, collate_tokens
from lightning_megatron.trainer.replica import Replica

Sample = dict[str, Tensor]
Collate = Callable[[list[Sample]], Sample]


class ReplicaLoader(DataLoader[Sample]):
    """A loader over a `GlobalBatchSampler` that knows how many samples it has handed out.

    Its state is one number, the same on every rank and for any number of replicas.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        sampler = self.sampler
        if not isinstance(sampler, GlobalBatchSampler):
            # Lightning puts another sampler in place under overfit_batches.
            yield from super().__iter__()
            return
        if not 0 <= sampler.consumed_samples - sampler.epoch * sampler.total_size < sampler.total_size:
            # Another epoch than the one that was left off in: from its start.
            sampler.consumed_samples = sampler.epoch * sampler.total_size
        for batch in super().__iter__():
            # Not the sampler itself: workers read ahead of what is handed out.
            sampler.consumed_samples += sampler.global_batch_size
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict() if isinstance(self.sampler, GlobalBatchSampler) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self.sampler, GlobalBatchSampler):
            self.sampler.load_state_dict(state)


class WholeBatches(Dataset[Sample]):
    """The samples, filled up to full batches by copies whose `loss_mask` is zero: each token counts exactly once."""

    def __init__(self, samples: Dataset[Sample], num_samples: int, batch_size: int) -> None:
        self._samples, self._num_samples = samples, num_samples
        self._length = -(-num_samples // batch_size) * batch_size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        if index < self._num_samples:
            return self._samples[index]
        sample = self._samples[0]
        return {**sample, "loss_mask": torch.zeros_like(sample["loss_mask"])}


def training_loader(
    samples: Dataset[Sample],
    num_samples: int,
    *,
    global_batch_size: int,
    replica: Replica,
    seed: int,
    num_workers: int,
    collate: Collate = collate_tokens,
) -> ReplicaLoader:
    """Shuffled batches of global_batch_size / replicas samples; what does not fill a global batch is left out."""
    sampler = GlobalBatchSampler(
        range(num_samples), global_batch_size=global_batch_size, num_replicas=replica.size, rank=replica.rank, seed=seed
    )
    return _loader(samples, sampler, num_workers, collate)


def evaluation_loader(
    samples: Dataset[Sample],
    num_samples: int,
    *,
    global_batch_size: int,
    replica: Replica,
    num_workers: int,
    collate: Collate = collate_tokens,
) -> ReplicaLoader:
    """All samples in order, once each, in batches of global_batch_size / replicas."""
    whole = WholeBatches(samples, num_samples, global_batch_size)
    sampler = GlobalBatchSampler(
        whole, global_batch_size=global_batch_size, num_replicas=replica.size, rank=replica.rank, shuffle=False
    )
    return _loader(whole, sampler, num_workers, collate)


def prompt_loader(prompts: list[Tensor]) -> DataLoader[Sample]:
    """One prompt [s] a batch, as `tokens` [1, s]; every replica takes all of them."""
    samples: Any = [{"tokens": prompt} for prompt in prompts]
    # With a sampler of this kind Lightning leaves the loader as it is.
    everywhere: DistributedSampler[Sample] = DistributedSampler(samples, num_replicas=1, rank=0, shuffle=False)
    return DataLoader(samples, batch_size=1, sampler=everywhere, collate_fn=collate_tokens)


def _loader(samples: Dataset[Sample], sampler: GlobalBatchSampler, num_workers: int, collate: Collate) -> ReplicaLoader:
    return ReplicaLoader(
        samples,
        batch_size=sampler.num_replica_samples,
        sampler=sampler,
        collate_fn=collate,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        # From which torch draws a seed for workers whenever they begin: the default one shall not notice.
        generator=torch.Generator(),
    )
