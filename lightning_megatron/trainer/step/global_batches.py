"""Global batches of an ordinary DataLoader: each data-parallel rank reads its part of what the user's samplers draw.

    batches of batch_size indices, drawn on every rank    | b0 b1 | b2 b3 | b4 b5 | b6 |
    data-parallel rank 0 of 2 reads                       | b0    | b2    | b4    | the first half of b6
    data-parallel rank 1 of 2 reads                       |    b1 |    b3 |    b5 | the rest of b6

So global batches are those of one device whose batch_size is the loader's times the data-parallel size, in the order
that the user's own samplers draw. All ranks draw the same, since they hold the same states of the random generators.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any, Literal, Protocol, runtime_checkable

from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from lightning_megatron.comm import rng
from lightning_megatron.mesh import Axis
from lightning_megatron.trainer.config import ConfigurationError

WithoutRows = Literal["repeat", "end", "drop"]
"""What ranks do where the last global batch has fewer rows than there are ranks. repeat: ranks without a row take one
of another rank, which counts for nothing. end: they have a batch fewer. drop: the batch is left out on all ranks."""

# Indices of a global batch that tell whether the ranks draw the same order.
_NUM_COMPARED = 32


@runtime_checkable
class FollowsEpochs(Protocol):
    """A sampler whose order depends on the epoch, as DistributedSampler's does."""

    def set_epoch(self, epoch: int) -> None: ...


@dataclass(frozen=True)
class BatchShare:
    """This data-parallel rank's part of a global batch."""

    first_row: int
    """Index of its first row in the global batch."""
    num_before: int
    """Rows of the global batches before it."""
    order: int
    """Hash of the first indices of the global batch, equal on all ranks."""
    is_copy: bool = False
    """Whether it is a row of another rank, since there is none for this one."""


class GlobalBatches(Sampler[Any]):
    """Batches of indices for this data-parallel rank, out of the global batches that the user's samplers draw.

    `base` is the batch sampler of a DataLoader, or its sampler where batch_size is None and each index is a batch. Of a
    last, smaller global batch each rank takes as many rows as the others, or one more. `name` says in warnings which
    loader it is.
    """

    def __init__(
        self, base: Iterable[Any], dp: Axis, *, is_batched: bool, without_rows: WithoutRows, name: str = "training"
    ) -> None:
        self.base = base
        self._rank, self._size = dp.rank, dp.size
        self._is_batched = is_batched
        # Batches of a user's own batch sampler may have any number of rows.
        self._has_own_batches = is_batched and type(base) is not BatchSampler
        self._without_rows = without_rows
        self._name = name
        self._has_warned = False
        # By the number of the batch in this round: drawn, and perhaps read, but not yet trained on.
        self._shares: dict[int, BatchShare] = {}

    @property
    def sampler(self) -> Any:
        """The sampler below the user's batch sampler; Lightning sets its epoch."""
        return getattr(self.base, "sampler", None)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the user's sampler."""
        if isinstance(self.base, FollowsEpochs):
            self.base.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return self.part_of(self.base)

    def part_of(self, drawn: Iterable[Any], number: int = 0) -> Iterator[Any]:
        """This rank's part of what a sampler draws; its first batch is that `number` of the round."""
        self._shares.clear()
        num_before = 0
        for parts in self._global_batches(drawn):
            own, num_rows = parts[self._rank], sum(map(len, parts))
            if num_rows < self._size:
                self._warn_of_missing_rows(num_rows)
            is_copy = len(own) == 0
            if is_copy and self._without_rows == "end":
                return
            first_row = 0 if is_copy else sum(map(len, parts[: self._rank]))
            order = rng.key(repr(list(parts[0][:_NUM_COMPARED])))
            self._shares[number] = BatchShare(first_row, num_before, order, is_copy)
            own = parts[0][:1] if is_copy else own
            yield own if self._is_batched else own[0]
            number += 1
            num_before += num_rows

    def __len__(self) -> int:
        num_drawn, num_together = self._sizes()
        num_full, rest = divmod(num_drawn, num_together)
        if rest == 0 or self._drops_rest(rest):
            return num_full
        if self._without_rows == "end" and not self._has_own_batches:
            return num_full + (self._rank < rest)
        return num_full + 1

    def share(self, number: int) -> BatchShare | None:
        """This rank's part of the global batch with a number in this round; None where no such batch was drawn."""
        for earlier in [drawn for drawn in self._shares if drawn < number]:
            del self._shares[earlier]
        return self._shares.get(number)

    @property
    def repeats_rows(self) -> bool:
        """Whether ranks repeat a row in the last global batch of a round, as far as lengths say."""
        if self._without_rows != "repeat" or self._has_own_batches:
            return False
        try:
            num_drawn, num_together = self._sizes()
        except TypeError:
            return False
        rest = num_drawn % num_together
        return 0 < rest < self._size and not self._drops_rest(rest)

    def check(self) -> None:
        """Warns where the last global batch will have fewer rows than there are ranks, as far as that is known.

        Raises ConfigurationError where a rank of a prediction would have no batch at all.
        """
        try:
            num_drawn, num_together = self._sizes()
        except TypeError:
            # A sampler without a length.
            return
        rest = num_drawn % num_together
        if self._without_rows == "end" and num_drawn < self._size and not self._has_own_batches:
            raise ConfigurationError(
                f"the {self._name} DataLoader draws {num_drawn} samples for {self._size} data-parallel ranks, of which "
                f"each needs one; give it at least {self._size}, or use fewer data-parallel ranks"
            )
        is_known = not self._has_own_batches or self._without_rows == "drop"
        if is_known and 0 < rest < self._size and not getattr(self.base, "drop_last", False):
            self._warn_of_missing_rows(rest)

    def _sizes(self) -> tuple[int, int]:
        """What the user's samplers draw in a round, and how much of it is one global batch."""
        if type(self.base) is BatchSampler:
            return len(self.base.sampler), self.base.batch_size * self._size  # type: ignore[arg-type]
        return len(self.base), self._size  # type: ignore[arg-type]

    def _drops_rest(self, rest: int) -> bool:
        """Whether a last, smaller global batch is left out, of so many samples, or batches of a user's own sampler."""
        return getattr(self.base, "drop_last", False) or (self._without_rows == "drop" and rest < self._size)

    def _global_batches(self, drawn: Iterable[Any]) -> Iterator[Sequence[Sequence[Any]]]:
        """The parts of all ranks, global batch after global batch."""
        if type(drawn) is BatchSampler:
            num_rows = drawn.batch_size * self._size
            for rows in BatchSampler(drawn.sampler, num_rows, drawn.drop_last):
                if len(rows) == num_rows or not self._drops_rest(len(rows)):
                    yield _evenly(rows, self._size)
            return
        batches = iter(drawn) if self._is_batched else ([index] for index in drawn)
        while parts := list(islice(batches, self._size)):
            if len(parts) == self._size:
                # Each as the user's batch sampler made it, such as of samples of one length.
                yield parts
            elif not self._drops_rest(len(parts)):
                yield _evenly(list(chain.from_iterable(parts)), self._size)

    def _warn_of_missing_rows(self, rest: int) -> None:
        if self._has_warned or self._without_rows == "end":
            return
        self._has_warned = True
        does = "it is left out of each epoch"
        if self._without_rows == "repeat":
            does = (
                "the ranks without one repeat a sample, which has no weight in losses, logged values and metrics, but "
                "which your own code sees twice"
            )
        what = "batches of its batch sampler" if self._without_rows == "drop" and self._has_own_batches else "samples"
        rank_zero_warn(
            f"the last global batch of the {self._name} DataLoader has {rest} {what}, fewer than there are "
            f"data-parallel ranks ({self._size}): {does}. Use drop_last=True, or numbers of samples, batch_size and "
            "ranks that leave no such rest"
        )


def cut(loader: DataLoader[Any], dp: Axis, without_rows: WithoutRows, name: str) -> DataLoader[Any]:
    """The loader, reading this rank's part of its global batches; as it is where one rank reads all, or it shards by a
    DistributedSampler. `name` says which loader it is.

    Raises ConfigurationError where prediction has fewer samples than ranks. Warns where ranks repeat a row.
    """
    drawn: Any = loader.batch_sampler
    tracks_indices = isinstance(drawn, _IndexBatchSamplerWrapper)
    drawn = drawn._batch_sampler if tracks_indices else drawn
    is_batched = drawn is not None
    drawn = drawn if is_batched else loader.sampler
    # A CombinedLoader of the user keeps what an earlier run put in.
    own: Any = drawn.base if isinstance(drawn, GlobalBatches) else drawn
    base = own
    sharding = (loader.sampler, base, getattr(base, "sampler", None))
    if dp.size > 1 and not any(isinstance(one, DistributedSampler) for one in sharding):
        own = GlobalBatches(base, dp, is_batched=is_batched, without_rows=without_rows, name=name)
        own.check()
    if own is drawn:
        return loader
    found = copy.copy(loader)
    # A copy keeps the user's class and attributes. Torch lets nobody set these two on a loader that was made.
    # It would not notice once it has begun, and the copy has not.
    reads_from = _IndexBatchSamplerWrapper(own) if tracks_indices else own
    vars(found).update({"batch_sampler" if is_batched else "sampler": reads_from, "_iterator": None})
    return found


def cut_of(loader: Any) -> GlobalBatches | None:
    """The global batches that a loader reads its part of; None where it was not cut."""
    for reads_from in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        if isinstance(reads_from, _IndexBatchSamplerWrapper):
            reads_from = reads_from._batch_sampler
        if isinstance(reads_from, GlobalBatches):
            return reads_from
    return None


def is_stream(loader: object) -> bool:
    """Whether only reading a loader shows where it ends: it has no length, or one that an IterableDataset claims."""
    return not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)


def _evenly(rows: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """The rows in that many parts, the larger ones first."""
    share, larger = divmod(len(rows), size)
    firsts = [rank * share + min(rank, larger) for rank in range(size + 1)]
    return [rows[first:last] for first, last in pairwise(firsts)]
