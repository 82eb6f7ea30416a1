"""Gathers over all ranks for callbacks, under any strategy: Lightning's own differ from strategy to strategy.

Every rank of a Trainer calls these together.
"""

from typing import Any

import lightning as L
import torch.distributed as dist


def gathered(value: Any, trainer: L.Trainer) -> list[Any]:
    """The picklable values of all ranks, in the order of global ranks, on each of them."""
    if trainer.world_size == 1:
        return [value]
    values: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(values, value)
    return values


def gathered_on_first(value: Any, trainer: L.Trainer) -> list[Any] | None:
    """Values of all ranks on the first rank; None on the others."""
    if trainer.world_size == 1:
        return [value]
    values: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
    dist.gather_object(value, values, dst=0)
    return values


def meet(trainer: L.Trainer) -> None:
    """Returns when every rank has come here."""
    if trainer.world_size > 1:
        dist.barrier()
