"""What every rank tries by itself, and ends on all of them if one fails: none waits for a rank that has raised."""

from collections.abc import Callable
from typing import TypeVar

import torch

from lightning_megatron.comm.collectives import all_reduce, gather_objects
from lightning_megatron.mesh import Axis

T = TypeVar("T")


def on_all(attempt: Callable[[], T], world: Axis) -> T:
    """What this rank's attempt gives, once those of all ranks have come to their end. Collective.

    What any rank runs into is raised on all of them, in words, with the rank: ValueError where all that was found are
    such, else RuntimeError. On the rank itself it is the cause.
    """
    found: T
    fault: Exception | None = None
    try:
        found = attempt()
    except Exception as error:
        fault = error
    if not int(all_reduce(torch.tensor(int(fault is not None)), world, "max")):
        return found
    said = None if fault is None else (isinstance(fault, ValueError), f"{type(fault).__name__}: {fault}")
    by_rank = gather_objects(said, world)
    ranks_of: dict[str, list[str]] = {}
    for rank, one in enumerate(by_rank):
        if one is not None:
            ranks_of.setdefault(one[1], []).append(str(rank))
    kind = ValueError if all(is_of_input for is_of_input, _ in filter(None, by_rank)) else RuntimeError
    raise kind("; ".join(f"rank {', '.join(ranks)}: {words}" for words, ranks in ranks_of.items())) from fault
