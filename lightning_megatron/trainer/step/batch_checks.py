"""Checks that ranks which work on one batch together read the same one, and that shapes are equal where sizes are."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis

# Batches of each kind of loop whose contents are compared over the ranks of a model replica.
_CHECKED_BATCHES = 2


class BatchChecks:
    """Checks of the batches of one run, the costly ones for the first batches of each kind of step only."""

    def __init__(self, linked: Axis, *, needs_equal_shapes: bool) -> None:
        self._linked = linked
        self._needs_equal_shapes = linked.size > 1 and needs_equal_shapes
        self._num_checked: dict[str, int] = {}

    def check(self, name: str, batch: Any, replica: Axis) -> None:
        """Raises RuntimeError where ranks of a model replica hold different batches. Collective over those ranks.

        Data-parallel ranks that share experts need equal shapes too, where their dispatcher takes sizes for known.
        """
        if self._needs_equal_shapes:
            require_equal_shapes(batch, self._linked)
        checked = self._num_checked.get(name, 0)
        if replica.size == 1 or checked >= _CHECKED_BATCHES or batch is None:
            return
        self._num_checked[name] = checked + 1
        require_equal_batches(batch, replica)


def batch_digest(batch: Any) -> str:
    """A hash of every tensor and plain value of a batch and of their places; mappings may be in any order."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in _in_order(batch):
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


def _in_order(batch: Any) -> Iterator[Any]:
    """What a batch holds, and what tells its place there: mappings by their keys, in whatever order they are."""
    if isinstance(batch, dict):
        for key in sorted(batch, key=repr):
            yield repr(key)
            yield from _in_order(batch[key])
        return
    leaves, spec = tree_flatten(batch, is_leaf=lambda one: isinstance(one, dict))
    yield str(spec)
    for leaf in leaves:
        yield from _in_order(leaf) if isinstance(leaf, dict) else [leaf]


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


def require_equal_shapes(batch: Any, dp: Axis) -> None:
    """Raises RuntimeError, on every data-parallel rank, where the tensors of their batches have different shapes.

    Experts whose dispatcher gathers all tokens, or whose rows are padded to a capacity, take sizes for known.
    """
    own = [tuple(leaf.shape) for leaf in _in_order(batch) if isinstance(leaf, Tensor)]
    shapes = collectives.gather_objects(own, dp)
    if any(other != own for other in shapes):
        raise RuntimeError(
            f"data-parallel ranks that share experts got batches of the shapes {shapes}; the dispatcher "
            "'all_gather', and a capacity with pad_to_capacity=True, need the same on all of them: use the dispatcher "
            "'all_to_all' and pad_to_capacity=False, or "
            "batches of one size (drop_last, sequences of one length)"
        )
