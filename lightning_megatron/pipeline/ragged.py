"""Any number of values for each row of a batch, such as the images of a sample, as one thing that microbatches cut.

A batch that holds one is cut along its rows like a tensor; Lightning moves it to the device by `to`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Ragged:
    """`values` [values of all rows, ...] in the order of the rows, of which row i has `counts[i]`.

    Raises ValueError where the counts do not add up.
    """

    def __init__(self, values: Tensor, counts: Sequence[int]) -> None:
        if values.dim() == 0 or any(count < 0 for count in counts) or sum(counts) != values.shape[0]:
            raise ValueError(
                f"counts {list(counts)} must each be at least 0, and their sum ({sum(counts)}) the number of values, "
                f"which have the shape {tuple(values.shape)}"
            )
        self.values, self.counts = values, tuple(counts)

    @staticmethod
    def of(rows: Sequence[Tensor]) -> "Ragged":
        """A ragged batch made of a tensor [values, ...] for each row. Raises ValueError where there is none."""
        if not rows:
            raise ValueError("a Ragged needs at least one row, to know the shape of its values")
        return Ragged(torch.cat(list(rows)), [len(row) for row in rows])

    @property
    def num_rows(self) -> int:
        return len(self.counts)

    def narrow(self, start: int, num_rows: int) -> "Ragged":
        """The rows from `start` on, as a view."""
        first, counts = sum(self.counts[:start]), self.counts[start : start + num_rows]
        return Ragged(self.values.narrow(0, first, sum(counts)), counts)

    def to(self, *args: Any, **kwargs: Any) -> "Ragged":
        """A copy on another device or in another dtype, as `Tensor.to` makes it."""
        return Ragged(self.values.to(*args, **kwargs), self.counts)

    def pin_memory(self) -> "Ragged":
        """A copy in pinned memory, as data loaders ask for it."""
        return Ragged(self.values.pin_memory(), self.counts)

    def __repr__(self) -> str:
        return f"Ragged({tuple(self.values.shape)} of {self.values.dtype}, counts={list(self.counts)})"
