"""A lower bound on the time of a step, by which plans are judged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_megatron.context.balance.config import DynamicContextConfig, group_sizes
from lightning_megatron.context.balance.cost import CostModel, Floats

# Weights of the two bounds on a pack to try; each gives a true bound, and the best is taken.
RING_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)


def lower_bound(
    lengths: Sequence[int], ranks: int, cost: CostModel, config: DynamicContextConfig, *, pp: int = 1
) -> float:
    """Least seconds of any plan, as `step_seconds` counts them.

    With M microbatches:

    - A group of g ranks spends g fixed rank-seconds, and at least max(U, V) for its documents: U = a T + b Q where the
      ring is hidden, V = a T + b Q / g + (g - 1) c T where it is seen (the largest of both is what the formula says,
      but for the latency). For any weight w from 0 to 1 that is at least (1 - w) U + w V, a sum over documents; and a
      document adds no less than on the best size that has room for it. These sums over all documents, with one w for
      all, and M fixed parts on each of the R ranks: the slowest rank is not below the mean,
      mean(M) = M fixed + sum / R.
    - The group with document L takes no less than L alone on the best size that has room for it, since seconds grow
      with T and Q; longest = that of the longest document. Its ranks pay M - 1 other microbatches.
    - The longest microbatch is no shorter than the mean one of the slowest rank, nor than the longest document.

    So a step takes at least the smallest, over the M that are allowed, of

        max(mean(M), longest + (M - 1) fixed) + (pp - 1) max(mean(M) / M, longest)

    M is at least what the config asks and what the tokens need under the memory cap; more microbatches than documents
    are taken only where the config forces them. Waiting of the ranks of a group and the grain of documents are left
    out, so the bound need not be reachable.
    """
    fewest = fewest_microbatches(lengths, ranks, config)
    most = max(fewest, rounded_up(len(lengths), config.microbatch_multiple))
    counts = np.arange(fewest, most + 1, config.microbatch_multiple, dtype=np.float64)
    means = counts * cost.fixed_seconds + least_work(lengths, ranks, cost, config) / ranks
    longest = _longest_document_seconds(max(lengths), ranks, cost, config)
    slowest = np.maximum(means, longest + (counts - 1) * cost.fixed_seconds)
    return float((slowest + (pp - 1) * np.maximum(means / counts, longest)).min())


def least_work(lengths: Sequence[int], ranks: int, cost: CostModel, config: DynamicContextConfig) -> float:
    """Least rank-seconds of all documents without fixed parts: the sum in the docstring of `lower_bound`."""
    tokens = np.asarray(lengths, dtype=np.float64)
    hidden: Floats = cost.seconds_per_token * tokens + cost.seconds_per_square * tokens**2
    sums = []
    for weight in RING_WEIGHTS:
        least = np.full_like(tokens, np.inf)
        for size in group_sizes(ranks, config):
            seen = cost.seconds_per_token * tokens + cost.seconds_per_square * tokens**2 / size
            seen += (size - 1) * cost.sent_seconds(size) * tokens
            own = (1 - weight) * hidden + weight * seen
            least = np.where(tokens <= size * config.max_tokens_per_rank, np.minimum(least, own), least)
        sums.append(float(least.sum()))
    return max(sums)


def fewest_microbatches(lengths: Sequence[int], ranks: int, config: DynamicContextConfig) -> int:
    """Least number of microbatches that the config and its memory cap allow."""
    needed = -(-sum(lengths) // (ranks * config.max_tokens_per_rank))
    return rounded_up(max(needed, config.min_microbatches), config.microbatch_multiple)


def rounded_up(count: int, multiple: int) -> int:
    """`count` rounded up to a multiple."""
    return -(-count // multiple) * multiple


def _longest_document_seconds(longest: int, ranks: int, cost: CostModel, config: DynamicContextConfig) -> float:
    """Seconds of the longest document alone, on its best group size."""
    sizes = [size for size in group_sizes(ranks, config) if longest <= size * config.max_tokens_per_rank]
    return min(cost.seconds(float(longest), float(longest) ** 2, size) for size in sizes)
