"""Random numbers that the user's code draws agree on all ranks that run a microbatch together."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from lightning_megatron.comm import rng


def seed_random(*parts: int | str) -> None:
    """Has the default generators (torch, numpy, Python) start from a key of `parts`."""
    seed = rng.key(*parts) & ((1 << 63) - 1)
    rng.seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def aligned_random(*parts: int | str) -> Iterator[None]:
    """The default generators start from a key of `parts` and are put back afterwards.

    The code around a model call runs on some ranks and not on others; without this its draws would drift apart.
    """
    with kept_random():
        seed_random(*parts)
        yield


@contextmanager
def kept_random() -> Iterator[None]:
    """The default generators go on after the block as if nothing had been drawn in it."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
