"""Means over the tokens of an evaluation, as torchmetrics: they add sums over batches and dp ranks, and divide once.

A mean of the batches' means would weigh a token by how full its batch is.
"""

import torch
from torch import Tensor
from torchmetrics import Metric


class TokenMean(Metric):
    """The mean of something over all tokens that count, each by its weight; NaN where none does."""

    full_state_update = False
    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        # In float64, in which the sums of many batches do not depend on how these were cut.
        for name in ("total", "weight"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, total: Tensor, weight: Tensor) -> None:
        """Adds a batch: the sum over its tokens [], and the sum of their weights []."""
        self.total += total
        self.weight += weight

    def compute(self) -> Tensor:
        return self.total / self.weight


class Perplexity(TokenMean):
    """The exponential of the mean negative log-likelihood, of which it takes in the sums."""

    def compute(self) -> Tensor:
        return super().compute().exp()
