"""The default generators of a process (torch, CUDA, numpy, Python) as plain data, and back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

States = dict[str, Any]
"""Plain data: what `torch.load` reads without running code."""


def states() -> States:
    """States of the default generators, as copies."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None,
        "numpy": [str(name), torch.from_numpy(np.array(keys, dtype=np.int64)), position, has_gauss, float(cached)],
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
    }


def set_states(saved: States) -> None:
    """Sets the default generators to states that `states` returned."""
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
    name, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words.tolist()), gauss))


@contextmanager
def forked() -> Iterator[None]:
    """Restores the default generators after the block, whatever is drawn inside."""
    before = states()
    try:
        yield
    finally:
        set_states(before)
