"""Lengths of documents in tokens, drawn to measure packing and balance: log-normal, cut at both ends.

No published figure gives the lengths of the published speed-ups, so all parameters are assumed. They follow the known
properties of such data: most documents are short, a few are longer than all others together, code more than web pages.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """exp(normal), no shorter than `shortest` and no longer than `longest` tokens."""

    median: float
    sigma: float
    """Standard deviation of the logarithm."""
    longest: int
    shortest: int = 16

    def draw(self, rng: np.random.Generator, num_documents: int) -> list[int]:
        drawn = rng.lognormal(np.log(self.median), self.sigma, num_documents)
        return [int(length) for length in np.clip(drawn, self.shortest, self.longest)]


LOG_NORMAL = LengthDistribution(median=1100, sigma=1.2, longest=131072)
GITHUB = LengthDistribution(median=700, sigma=1.7, longest=131072)
COMMON_CRAWL = LengthDistribution(median=600, sigma=1.1, longest=131072)
