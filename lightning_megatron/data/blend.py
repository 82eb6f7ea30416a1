"""Several sources as one, by weight, so that every prefix holds them in proportion.

Between samples and the sampler. Which source sample i comes from, and which of its samples it is, is computed from i
alone: there is no table, and nothing to build or to store.

The sources are the leaves of a Huffman tree of their weights. Of the first n samples of a node, its lighter child with
the fraction f of the node's weight gives floor(n f + 1/2), and the heavier one the rest. Each rounding is off by at
most 1/2, and reaches a leaf in the measure of the leaf's part of that child. Each node on the way up weighs at least as
much as the two below it together, so that after n samples a source's count differs from n times its share by less than
(1 + 1 + 1/2 + 1/3 + 1/5 + 1/8 + ...) / 2 < 1.7, for any number of sources and any weights.
Source of the tree: Huffman 1952.
"""

import heapq
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from torch.utils.data import Dataset

_BLOCK = 1 << 18

# A leaf is the number of a source; a node is its lighter and heavier child and the lighter one's fraction.
_Node: TypeAlias = "int | tuple[_Node, _Node, float]"


class Blend:
    """The order of sources by `weights`, which are in proportion: 3 and 1 is as 0.75 and 0.25.

    A source of weight 0 is never taken. Raises ValueError for weights that are negative, not finite, or all 0.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        faults = [f"number {i} is {w}" for i, w in enumerate(weights) if not (math.isfinite(w) and w >= 0)]
        if faults or not any(weights):
            what = "; ".join(faults) or f"all {len(weights)} are 0"
            raise ValueError(f"weights of a blend must be finite, at least 0 and not all 0: {what}; 1 each is even")
        highest = max(weights)
        total = math.fsum(w / highest for w in weights)
        self.shares = tuple(w / highest / total for w in weights)
        heap: list[tuple[float, int, _Node]] = [(w / highest, i, i) for i, w in enumerate(weights) if w / highest > 0]
        heapq.heapify(heap)
        # The second entry is unlike in any two, so that nodes are never compared.
        for number in range(len(weights), len(weights) + len(heap) - 1):
            lighter, heavier = heapq.heappop(heap), heapq.heappop(heap)
            weight = lighter[0] + heavier[0]
            heapq.heappush(heap, (weight, number, (lighter[2], heavier[2], lighter[0] / weight)))
        self._root = heap[0][2]

    def counts(self, num_samples: int) -> list[int]:
        """Samples of each source among the first `num_samples`."""
        counts = [0] * len(self.shares)
        todo = [(self._root, num_samples)]
        while todo:
            node, count = todo.pop()
            if isinstance(node, int):
                counts[node] = count
            else:
                of_lighter = _rounded(count, node[2])
                todo += [(node[0], of_lighter), (node[1], count - of_lighter)]
        return counts

    def locate(self, index: int) -> tuple[int, int]:
        """The source of sample `index`, and its number among that source's samples."""
        node = self._root
        while not isinstance(node, int):
            lighter, heavier, fraction = node
            before = _rounded(index, fraction)
            is_of_lighter = _rounded(index + 1, fraction) > before
            node, index = (lighter, before) if is_of_lighter else (heavier, index - before)
        return node, index

    def most_samples(self, sizes: Sequence[int]) -> int:
        """Number of samples that the blend gives before a source of `sizes[i]` samples is exhausted."""
        low, high = 0, 1
        while self._fits(high, sizes):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle, sizes) else (low, middle)
        return low

    def _fits(self, num_samples: int, sizes: Sequence[int]) -> bool:
        return all(count <= size for count, size in zip(self.counts(num_samples), sizes, strict=True))


class BlendedSamples(Dataset[Any]):
    """Samples of several sources in the order of a `Blend`.

    To keep the proportion of every prefix, take them in order: each source brings its own. Raises ValueError where a
    source has fewer samples than the blend asks of it.
    """

    def __init__(self, sources: Sequence[Any], weights: Sequence[float], num_samples: int) -> None:
        if len(sources) != len(weights):
            raise ValueError(f"{len(sources)} sources have {len(weights)} weights; give each source one")
        if num_samples < 1:
            raise ValueError(f"num_samples ({num_samples}) of a blend must be at least 1")
        self.sources = list(sources)
        self.blend = Blend(weights)
        self.num_samples = num_samples
        counts = self.blend.counts(num_samples)
        short = [
            f"source {i} has {len(source)} samples and is asked for {count}"
            for i, (source, count) in enumerate(zip(self.sources, counts, strict=True))
            if count > len(source)
        ]
        if short:
            raise ValueError(
                f"a blend of num_samples ({num_samples}) takes more than there is: {'; '.join(short)}; give these"
                " sources more epochs or less weight, or set num_samples to at most"
                f" {self.blend.most_samples([len(source) for source in self.sources])}"
            )

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        source, number = self.blend.locate(index)
        return self.sources[source][number]


def _rounded(count: int, fraction: float) -> int:
    """Samples of a share. A fraction of at most 1/2 makes it rise by 0 or 1 a count."""
    return math.floor(count * fraction + 0.5)
