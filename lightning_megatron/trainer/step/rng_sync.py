"""All ranks of one replica see the same data and draw the same random numbers in the user's code."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_megatron.comm import collectives, rng
from lightning_megatron.mesh import Axis


@contextmanager
def aligned_random(*parts: int | str) -> Iterator[None]:
    """The default generators (torch, numpy, Python) start from a key of `parts` and are put back afterwards.

    The code around a model call runs on some ranks and not on others; without this its draws would drift apart.
    """
    seed = rng.key(*parts) & ((1 << 63) - 1)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        # Not torch.manual_seed: for each kind of accelerator that is not there it keeps a call, with a stack trace,
        # for the day that it comes up; once a microbatch that is milliseconds, and memory without end.
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def batch_digest(batch: Any) -> str:
    """A hash of every tensor and plain value of a batch."""
    leaves, spec = tree_flatten(batch)
    digest = hashlib.blake2b(str(spec).encode(), digest_size=16)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            digest.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
            data = leaf.detach().contiguous().cpu().reshape(-1)
            if data.numel():
                # An empty one has no stride by which it could be viewed.
                digest.update(data.view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, (int, float, str, bool, bytes)):
            digest.update(repr(leaf).encode())
        elif vars_of := getattr(leaf, "__dict__", None):
            # A dataclass or a mapping of somebody's own (as of transformers) is one leaf to pytree.
            digest.update(batch_digest(dict(vars_of)).encode())
    return digest.hexdigest()


def require_equal_batches(batch: Any, replica: Axis) -> None:
    """Raises RuntimeError, on every rank, where the ranks of one model replica hold different batches."""
    digests = collectives.gather_objects(batch_digest(batch), replica)
    if len(set(digests)) == 1:
        return
    ranks: dict[str, list[int]] = {}
    for global_rank, digest in zip(replica.ranks, digests, strict=True):
        ranks.setdefault(digest, []).append(global_rank)
    raise RuntimeError(
        f"the ranks of one model replica got different batches: {' / '.join(str(sorted(r)) for r in ranks.values())}. "
        "Tensor, pipeline and context parallel ranks work on one sample together and must read the same data: shard by "
        "trainer.strategy.data_parallel_rank and data_parallel_size, not by the global rank, and shuffle with a seed "
        "that all ranks share"
    )
