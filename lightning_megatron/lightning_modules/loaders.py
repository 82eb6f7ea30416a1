"""Loaders that give each data-parallel rank its part of every global batch and resume on any layout.

Between the samplers of `data/` and Lightning's loops.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_megatron.data import BatchRamp, EpochSampler, GlobalBatchSampler, InfiniteSampler, collate_tokens
from lightning_megatron.data.collate import Sample
from lightning_megatron.pipeline.ragged import Ragged
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.setup.replica import Replica

Collate = Callable[[list[Sample]], Sample]
COPY = -1
"""Number of a prompt that only pads a batch, whose text is dropped."""
_ALONE = Replica(0, 1)
_Loader = TypeVar("_Loader", bound=DataLoader[Sample])


class ResumableLoader(DataLoader[Sample]):
    """A loader over a `GlobalBatchSampler` that knows how many samples it has handed out.

    Its state is one number, equal on every rank and for any number of data-parallel ranks.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        sampler = self.sampler
        if not isinstance(sampler, GlobalBatchSampler):
            # Lightning replaces the sampler under overfit_batches.
            yield from super().__iter__()
            return
        if not 0 <= sampler.consumed_samples - sampler.epoch * sampler.total_size < sampler.total_size:
            # Another epoch than the interrupted one begins at its start.
            sampler.consumed_samples = sampler.epoch * sampler.total_size
        for batch in super().__iter__():
            # Not the sampler itself: workers read ahead of what is handed out.
            sampler.consumed_samples += sampler.global_batch_size
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict() if isinstance(self.sampler, GlobalBatchSampler) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "states" in state:
            raise ConfigurationError(
                "the checkpoint is of a run whose text streamed, and its position in the stream is none in samples"
                " that have an order of their own; resume it with streaming, or start anew from the checkpoint's"
                " weights"
            )
        self._go_on_after(state)

    def _go_on_after(self, state: dict[str, Any]) -> None:
        if isinstance(self.sampler, GlobalBatchSampler):
            self.sampler.load_state_dict(state)


class InfiniteLoader(ResumableLoader):
    """A loader over an `InfiniteSampler`, which has no epochs of its own: it goes on after the samples consumed."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in DataLoader.__iter__(self):
            self._infinite.consumed_samples += self._infinite.next_size
            yield batch

    @property
    def _infinite(self) -> InfiniteSampler:
        assert isinstance(self.sampler, InfiniteSampler)
        return self.sampler

    def state_dict(self) -> dict[str, Any]:
        return {"consumed_samples": self._infinite.consumed_samples}

    def _go_on_after(self, state: dict[str, Any]) -> None:
        self._infinite.consumed_samples = int(state["consumed_samples"])


class SampleLists(Dataset[list[Sample]]):
    """A data set whose index is a list of numbers, and whose item the samples of these."""

    def __init__(self, samples: Dataset[Sample]) -> None:
        self._samples = samples

    def __getitem__(self, numbers: list[int]) -> list[Sample]:
        return [self._samples[number] for number in numbers]


class FullBatches(Dataset[Sample]):
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
    shuffle: bool = True,
    is_new_each_epoch: bool = False,
) -> ResumableLoader:
    """Batches of global_batch_size / dp samples, shuffled unless `shuffle` is False; what does not fill a global batch
    is left out. Indices of samples that are new in each epoch go on over epochs."""
    sampler = (EpochSampler if is_new_each_epoch else GlobalBatchSampler)(
        range(num_samples),
        global_batch_size=global_batch_size,
        num_replicas=replica.size,
        rank=replica.rank,
        shuffle=shuffle,
        seed=seed,
    )
    return _loader(ResumableLoader, samples, sampler, num_workers, collate)


def infinite_loader(
    samples: Dataset[Sample],
    num_samples: int,
    *,
    ramp: BatchRamp,
    replica: Replica,
    num_workers: int,
    collate: Collate = collate_tokens,
) -> InfiniteLoader:
    """Batches of a ramp's sizes over data-parallel ranks, of endless samples in their own order; an epoch is as many
    batches as the first `num_samples` give."""
    num_batches = ramp.num_batches(num_samples)
    if num_batches == 0:
        raise ValueError(
            f"the dataset's samples ({num_samples}) are too few for one global batch of {ramp.size_at(0)}; give more"
            " text, a shorter sequence_length or smaller batches"
        )
    return InfiniteLoader(
        SampleLists(samples),  # type: ignore[arg-type]
        batch_size=None,
        # Each of its numbers is a list: a global batch has more or fewer samples than the one before it.
        sampler=InfiniteSampler(ramp, num_batches, num_replicas=replica.size, rank=replica.rank),
        collate_fn=collate,
        **_options(num_workers),
    )


def evaluation_loader(
    samples: Dataset[Sample],
    num_samples: int,
    *,
    global_batch_size: int,
    replica: Replica,
    num_workers: int,
    collate: Collate = collate_tokens,
) -> DataLoader[Sample]:
    """All samples in order, once each, in batches of global_batch_size / dp; a round begins with the first."""
    full = FullBatches(samples, num_samples, global_batch_size)
    sampler = GlobalBatchSampler(
        full, global_batch_size=global_batch_size, num_replicas=replica.size, rank=replica.rank, shuffle=False
    )
    # Not a resumable one: a round may end early, and the next must see the same samples.
    return _loader(DataLoader, full, sampler, num_workers, collate)


def prompt_loader(
    prompts: list[Tensor],
    global_batch_size: int = 1,
    replica: Replica = _ALONE,
    entries: Sequence[Sample] | None = None,
) -> DataLoader[Sample]:
    """This data-parallel rank's part of batches of prompts [s]: `tokens` [batch, longest], padded with zeros after the
    `lengths` [batch], and the numbers of the prompts, `samples` [batch]. `entries` are further entries of each row.

    The first data-parallel rank takes the first prompts of a global batch. All ranks get equally many batches and rows,
    because model calls are collective: a rank with fewer gets copies of the first prompt, with the number COPY.
    """
    others = entries if entries is not None else [{} for _ in prompts]
    numbered = [
        {"tokens": prompt, "samples": torch.tensor(number), **other}
        for number, (prompt, other) in enumerate(zip(prompts, others, strict=True))
    ]
    own: Any = []
    for first in range(0, len(prompts), global_batch_size):
        batch = numbered[first : first + global_batch_size]
        num_own = -(-len(batch) // replica.size)
        rows = batch[replica.rank * num_own :][:num_own]
        own += rows + [{**numbered[0], "samples": torch.tensor(COPY)}] * (num_own - len(rows))
    # With a sampler of this kind Lightning leaves the loader as it is.
    in_order: DistributedSampler[Sample] = DistributedSampler(own, num_replicas=1, rank=0, shuffle=False)
    batch_size = -(-global_batch_size // replica.size)
    return DataLoader(own, batch_size=batch_size, sampler=in_order, collate_fn=_collate_prompts)


def _collate_prompts(samples: list[Sample]) -> Sample:
    prompts = [sample["tokens"] for sample in samples]
    if "images" in samples[0]:
        with_images: Sample = collate_images(samples, _collate_prompts)
        return with_images
    return {
        **{name: torch.stack([sample[name] for sample in samples]) for name in samples[0] if name != "tokens"},
        "tokens": pad_sequence(prompts, batch_first=True),
        "lengths": torch.tensor([len(prompt) for prompt in prompts]),
    }


def collate_images(samples: list[Sample], collate: Collate) -> Any:
    """A batch of the samples, their `images` as a Ragged, and their other entries by `collate`."""
    others = [{name: value for name, value in sample.items() if name != "images"} for sample in samples]
    return {**collate(others), "images": Ragged.of([sample["images"] for sample in samples])}


def _loader(
    kind: type[_Loader], samples: Dataset[Sample], sampler: GlobalBatchSampler, num_workers: int, collate: Collate
) -> _Loader:
    return kind(
        samples,
        batch_size=sampler.num_replica_samples,
        sampler=sampler,
        collate_fn=collate,
        **_options(num_workers),
    )


def _options(num_workers: int) -> dict[str, Any]:
    return {
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
        "pin_memory": torch.cuda.is_available(),
        # Torch draws a seed for workers from it whenever they begin, and not from the default generator.
        "generator": torch.Generator(),
    }
