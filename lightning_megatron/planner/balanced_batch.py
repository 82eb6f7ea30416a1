"""A step under dynamic context parallelism: the documents of a batch, and the groups of ranks that run them.

The balancer plans the batch before the planner does; each microbatch is then planned by itself.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np

from lightning_megatron.context.balance import CostModel, DynamicContextConfig, RankGroup, StepPlan, plan
from lightning_megatron.mesh import Sizes


@dataclass(frozen=True, kw_only=True)
class BalancedBatch:
    """One global batch, which stands for all."""

    lengths: tuple[int, ...]
    """Tokens of each document."""
    plan: StepPlan
    """The balancer's plan."""

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches on every rank."""
        return len(self.plan.slots)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the global batch."""
        return sum(self.lengths)

    def lengths_of(self, group: RankGroup) -> tuple[int, ...]:
        """Lengths of the documents that a group runs."""
        return tuple(self.lengths[document] for document in group.documents)

    def tokens_of(self, group: RankGroup) -> int:
        """Number of tokens of a group's microbatch on each of its ranks, with padding; 1 without documents."""
        return max(-(-sum(self.lengths_of(group)) // group.size), 1)

    @cached_property
    def lines(self) -> dict[int, tuple[RankGroup, ...]]:
        """Microbatches of dp x cp ranks by index, for the first of the ranks that run equal ones."""
        first: dict[tuple[RankGroup, ...], int] = {}
        for rank in range(self.plan.num_ranks):
            first.setdefault(self.plan.groups_of(rank), rank)
        return {rank: groups for groups, rank in first.items()}


def balanced(
    lengths: Sequence[int], sizes: Sizes, config: DynamicContextConfig, cost: CostModel, multiple: int = 1
) -> BalancedBatch:
    """A batch of documents of these lengths, balanced over the dp x cp ranks.

    The number of microbatches is also a multiple of `multiple`, for schedules that require one. Raises ValueError for
    documents that are longer than the widest group has room for.
    """
    own = replace(config, microbatch_multiple=math.lcm(config.microbatch_multiple, multiple))
    return BalancedBatch(lengths=tuple(lengths), plan=plan(lengths, sizes.dp * sizes.cp, cost, own, pp=sizes.pp))


# --- documents --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LogNormal:
    """A log-normal distribution of document lengths."""

    median: float
    """Median length in tokens."""
    sigma: float
    """Standard deviation of the logarithm."""

    def __post_init__(self) -> None:
        faults = []
        if not (math.isfinite(self.median) and self.median >= 1):
            faults.append(f"median ({self.median:g}) must be a finite number of at least 1")
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            faults.append(f"sigma ({self.sigma:g}) must be a finite number of at least 0")
        if faults:
            raise ValueError("\n".join(faults))


def drawn(lengths: LogNormal | Sequence[int], num_tokens: int, *, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of documents that fill a batch of so many tokens, none above `longest`, the last one cut to fit.

    Known lengths are drawn with replacement.
    """
    generator = np.random.default_rng(seed)
    found, left = [], num_tokens
    for length in _endless(lengths, generator):
        # Huge medians and deviations give infinite lengths.
        found.append(max(int(min(length, longest, left)), 1))
        left -= found[-1]
        if left == 0:
            break
    return tuple(found)


def num_cut(lengths: LogNormal | Sequence[int], num_documents: int, *, longest: int, seed: int = 0) -> int:
    """Number of documents that `drawn` cuts because they are longer than `longest`."""
    own = _endless(lengths, np.random.default_rng(seed))
    return sum(length > longest for length in islice(own, num_documents))


def _endless(lengths: LogNormal | Sequence[int], generator: np.random.Generator) -> Iterator[float]:
    known = np.empty(0) if isinstance(lengths, LogNormal) else np.asarray(lengths)
    while True:
        if isinstance(lengths, LogNormal):
            yield generator.lognormal(math.log(lengths.median), lengths.sigma)
        else:
            yield generator.choice(known)
