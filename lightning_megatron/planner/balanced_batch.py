"""A step under dynamic context parallelism as the planner sees it: the documents of a batch, and who runs which.

The balancer's own plan of that batch, made before anything is planned of it: each microbatch is then planned by itself.
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
    """Tokens of its documents."""
    plan: StepPlan
    """Plan of the balancer."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches on every rank."""
        return len(self.plan.slots)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the global batch."""
        return sum(self.lengths)

    def lengths_of(self, group: RankGroup) -> tuple[int, ...]:
        """Lengths of the documents that a group runs."""
        return tuple(self.lengths[document] for document in group.documents)

    def rows_of(self, group: RankGroup) -> int:
        """Tokens of a group's microbatch on each of its ranks, padding among them; of no document one."""
        return max(-(-sum(self.lengths_of(group)) // group.size), 1)

    @cached_property
    def lines(self) -> dict[int, tuple[RankGroup, ...]]:
        """The microbatches of the ranks dp x cp, by place; of ranks that run the same the first."""
        first: dict[tuple[RankGroup, ...], int] = {}
        for rank in range(self.plan.num_ranks):
            first.setdefault(self.plan.groups_of(rank), rank)
        return {rank: groups for groups, rank in first.items()}


def balanced(
    lengths: Sequence[int], sizes: Sizes, config: DynamicContextConfig, cost: CostModel, multiple: int = 1
) -> BalancedBatch:
    """A batch of documents of these lengths, balanced over the dp x cp ranks of the sizes.

    The number of microbatches is a multiple of `multiple` as well, as a schedule may ask. Raises ValueError for
    documents that are longer than the widest group has room for.
    """
    own = replace(config, microbatch_multiple=math.lcm(config.microbatch_multiple, multiple))
    return BalancedBatch(lengths=tuple(lengths), plan=plan(lengths, sizes.dp * sizes.cp, cost, own, pp=sizes.pp))


# --- documents --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LogNormal:
    """Lengths of documents whose logarithms are normal."""

    median: float
    """Tokens."""
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
    """Documents that fill a batch of so many tokens, none longer than `longest`, the last cut to what is left.

    Known lengths are drawn with replacement.
    """
    generator = np.random.default_rng(seed)
    found, left = [], num_tokens
    for length in _endless(lengths, generator):
        # Of huge medians and deviations some are infinite.
        found.append(max(int(min(length, longest, left)), 1))
        left -= found[-1]
        if left == 0:
            break
    return tuple(found)


def num_cut(lengths: LogNormal | Sequence[int], num_documents: int, *, longest: int, seed: int = 0) -> int:
    """Number of the documents that `drawn` gives that were longer than `longest` and cut."""
    own = _endless(lengths, np.random.default_rng(seed))
    return sum(length > longest for length in islice(own, num_documents))


def _endless(lengths: LogNormal | Sequence[int], generator: np.random.Generator) -> Iterator[float]:
    known = np.empty(0) if isinstance(lengths, LogNormal) else np.asarray(lengths)
    while True:
        if isinstance(lengths, LogNormal):
            yield generator.lognormal(math.log(lengths.median), lengths.sigma)
        else:
            yield generator.choice(known)
