"""Batches of replicas that make each model call together, because they share experts.

They wait for each other within every call. One that had a batch more in evaluation would wait for ever, or take
messages of what comes after; so each round of a loader asks first whether all have a batch.
"""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis


class EvenIterable:
    """What Lightning reads in the place of a loader that is no DataLoader."""

    def __init__(self, loader: Any, replicas: Axis, device: torch.device) -> None:
        vars(self).update(getattr(loader, "__dict__", {}))
        self.uneven, self.replicas, self.device = loader, replicas, device
        self.length = _longest(loader, replicas, device)

    def __iter__(self) -> Iterator[Any]:
        return _while_all_have(iter(self.uneven), self.replicas, self.device)

    def __len__(self) -> int:
        return _told(self.length, self.uneven)


class EvenDataLoader(DataLoader[Any]):
    """What Lightning reads in the place of a DataLoader, with all attributes of that; methods of a class of the user's
    stay with the loader itself (`uneven`)."""

    def __init__(self, loader: Any, replicas: Axis, device: torch.device) -> None:
        # Not the base's: this loader is not read itself.
        vars(self).update(vars(loader))
        self.uneven, self.replicas, self.device = loader, replicas, device
        self.length = _longest(loader, replicas, device)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return _while_all_have(iter(self.uneven), self.replicas, self.device)

    def __len__(self) -> int:
        return _told(self.length, self.uneven)

    @property
    def _iterator(self) -> Any:
        # By this name Lightning finds the workers that it ends.
        return self.uneven._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self.uneven._iterator = iterator


def even(loader: Any, replicas: Axis, device: torch.device) -> Any:
    """The loader as one that raises RuntimeError on every replica where some have a batch and others have none."""
    if isinstance(loader, (EvenIterable, EvenDataLoader)):
        # A CombinedLoader of the user keeps what an earlier run put in.
        loader = loader.uneven
    if replicas.size == 1:
        return loader
    kind = EvenDataLoader if isinstance(loader, DataLoader) else EvenIterable
    return kind(loader, replicas, device)


def require_equal_shapes(batch: Any, replicas: Axis) -> None:
    """Raises RuntimeError, on every replica, where the tensors of their batches have different shapes.

    Experts whose dispatcher gathers all tokens, or whose rows are padded to a capacity, take sizes for known.
    """
    own = [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    shapes = collectives.gather_objects(own, replicas)
    if any(other != own for other in shapes):
        raise RuntimeError(
            f"replicas that share experts got batches of the shapes {shapes}; the dispatcher 'all_gather', and a "
            "capacity with pad_to_capacity=True, need the same on all of them: use the dispatcher "
            "'all_to_all' and pad_to_capacity=False, or "
            "batches of one size (drop_last, sequences of one length)"
        )


def _longest(loader: Any, replicas: Axis, device: torch.device) -> int:
    """The most batches that the loader of a replica has; -1 where none can tell.

    Lightning asks for no batch past a length, so a replica with fewer would end without a word.
    """
    own = sized_len(loader)
    return int(collectives.all_reduce(torch.tensor(-1 if own is None else own, device=device), replicas, "max").item())


def _told(length: int, loader: Any) -> int:
    if length < 0:
        raise TypeError(f"{type(loader).__name__} has no length")
    return length


def _while_all_have(batches: Iterator[Any], replicas: Axis, device: torch.device) -> Iterator[Any]:
    nothing, number = object(), 0
    while True:
        batch = next(batches, nothing)
        having = torch.tensor(int(batch is not nothing), device=device)
        num = int(collectives.all_reduce(having, replicas).item())
        if 0 < num < replicas.size:
            raise RuntimeError(
                f"{num} of {replicas.size} replicas have a batch number {number + 1} to evaluate, the others have "
                "none; replicas share experts and make each model call together. Give all of them equally many "
                "batches, by a sampler that repeats samples, drop_last, or limit_val_batches (limit_test_batches, "
                "limit_predict_batches); or keep the ranks of experts within a replica: expert_model_parallel_size x "
                "expert_tensor_parallel_size divides tensor x context parallel size"
            )
        if not num:
            return
        number += 1
        yield batch
