"""Random numbers and permutations that are a function of a seed and a purpose.

Under the making of samples: the numbers of sample n depend on (seed, n), never on who draws them or what was drawn
before, so that every process, worker and resumed run makes the same sample.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_megatron.comm.rng import bits, key, uniform
from lightning_megatron.data.packing import Numbers

_BLOCK = 1 << 18
"""Numbers drawn at a time, so that they fit a processor's cache."""


def uniforms(count: int, *purpose: int | str) -> NDArray[np.float64]:
    """Uniform numbers in (0, 1) for a purpose, such as a seed and a name: [count]."""
    numbers: NDArray[np.float64] = uniform(key(*purpose), torch.arange(count)).numpy()
    return numbers


def uniforms_at(index: Numbers, *purpose: int | str) -> NDArray[np.float64]:
    """The numbers of `uniforms` at the positions `index`."""
    numbers: NDArray[np.float64] = uniform(key(*purpose), torch.from_numpy(index)).numpy()
    return numbers


def random_order(count: int, *purpose: int | str) -> Numbers:
    """A permutation of `count` numbers for a purpose: they are sorted by random bits.

    The lowest bits of the sort key are the number itself, so one sort of integers does it. At least 31 bits are random
    for up to 2^33 numbers; of two with the same bits the smaller comes first.
    """
    order_key = key(*purpose)
    low = (1 << max(count - 1, 1).bit_length()) - 1
    order = np.empty(count, dtype=np.int64)
    for start in range(0, count, _BLOCK):
        index = torch.arange(start, min(start + _BLOCK, count))
        order[start : start + _BLOCK] = ((bits(order_key, index) & ~low) | index).numpy()
    order.sort()
    order &= low
    return order
