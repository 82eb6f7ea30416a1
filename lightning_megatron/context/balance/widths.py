"""Number of ranks of each document: the dial that the balancer turns, and the widths that follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_megatron.context.balance.config import DynamicContextConfig
from lightning_megatron.context.balance.cost import CostModel, Floats

# A document is cut only until it takes this many times its shortest time: the last doublings of a group often gain
# little and cost all of its ranks.
SLACK = 1.25

# Index of each document's group size, longest document first.
Widths = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Dial:
    """One setting of the search."""

    longest_seconds: float
    """Most seconds of a document."""
    slack: float
    """Multiple of its seconds on its fastest size that a document may take instead."""
    num_microbatches: int
    """Least number of microbatches."""


@dataclass(frozen=True, slots=True)
class PlannedDocuments:
    """All documents, longest first, and the time of each alone on every group size."""

    order: npt.NDArray[np.intp]
    sizes: tuple[int, ...]
    """Group sizes, ascending."""
    seconds: Floats
    """Seconds [sizes, documents] without the fixed part; infinite over the memory cap."""
    seconds_by_level: list[list[float]]
    """Seconds by level, widest first, and document in the given order."""
    work: float
    """Rank-seconds of all documents, without fixed parts and communication."""

    @classmethod
    def of(
        cls, lengths: Sequence[int], sizes: tuple[int, ...], cost: CostModel, config: DynamicContextConfig
    ) -> PlannedDocuments:
        order = np.argsort(-np.asarray(lengths), kind="stable")
        tokens = np.asarray(lengths, dtype=np.float64)[order]
        rows = [
            np.where(
                tokens <= size * config.max_tokens_per_rank,
                cost.seconds(tokens, tokens**2, size) - cost.fixed_seconds,
                np.inf,
            )
            for size in sizes
        ]
        seconds = np.array(rows)
        as_given = np.empty_like(seconds)
        as_given[:, order] = seconds
        work = cost.work(float(tokens.sum()), float((tokens**2).sum()))
        return cls(order, sizes, seconds, as_given[::-1].tolist(), work)

    def widths(self, dial: Dial) -> Widths:
        """Smallest sizes that are as fast as the dial asks."""
        limits = np.maximum(dial.longest_seconds, dial.slack * self.seconds.min(axis=0))
        chosen: Widths = (self.seconds <= limits).argmax(axis=0)
        return chosen

    def by_level(self, widths: Widths) -> list[list[int]]:
        """Documents of each size, widest first, each list longest first."""
        return [self.order[widths == level].tolist() for level in reversed(range(len(self.sizes)))]

    def longest_seconds(self, widths: Widths) -> float:
        """Seconds of the slowest document on its size."""
        return float(self.seconds[widths, np.arange(len(self.order))].max())

    def neighbours(self, widths: Widths, critical: Sequence[int]) -> Iterator[Widths]:
        """Widths with one of the critical documents, slowest first, a size wider or narrower."""
        own = self.seconds[widths, np.arange(len(self.order))]
        is_critical = np.isin(self.order, critical)
        is_critical[own.argmax()] = True
        for document in np.flatnonzero(is_critical)[np.argsort(-own[is_critical], kind="stable")]:
            for change in (1, -1):
                width = widths[document] + change
                if 0 <= width < len(self.sizes) and np.isfinite(self.seconds[width, document]):
                    changed = widths.copy()
                    changed[document] = width
                    yield changed


def dials(documents: PlannedDocuments, ranks: int, fewest: int, pp: int) -> Iterator[Dial]:
    """Settings of the dial to try.

    Without a pipeline few microbatches are best, and a document may take as long as the mean rank works, or a half, a
    quarter ... of it. With one the longest microbatch counts pp - 1 times more: the number of microbatches is tried,
    and a document may take as long as a mean microbatch.
    """
    mean = documents.work / ranks
    if pp == 1:
        yield Dial(mean, SLACK, fewest)
        yield Dial(mean, 1.0, fewest)
        yield from (Dial(mean / 2**halvings, SLACK, fewest) for halvings in range(1, 2 + len(documents.sizes)))
        return
    for factor in (0, 1, 2, 3, 4, 6, 8):
        count = max(fewest, factor * (pp - 1))
        yield Dial(mean / count, SLACK, count)
    yield Dial(mean / count, 1.0, count)
