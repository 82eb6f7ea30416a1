"""Work that ranks do by themselves and whose errors end on all of them: no rank waits for another that has raised."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch

from lightning_megatron.comm.collectives import all_reduce, broadcast_object, gather_objects
from lightning_megatron.mesh import Axis

T = TypeVar("T")


def raise_on_all_ranks(attempt: Callable[[], T], world: Axis) -> T:
    """The result of this rank's attempt, once all ranks have ended theirs. Collective.

    An error of any rank is raised on all of them, in words and with the rank: as ValueError where all errors are, else
    as RuntimeError. On the rank itself the error is the cause.
    """
    result: T
    fault: Exception | None = None
    try:
        result = attempt()
    except Exception as error:
        fault = error
    if not int(all_reduce(torch.tensor(int(fault is not None)), world, "max")):
        return result
    message = None if fault is None else (isinstance(fault, ValueError), f"{type(fault).__name__}: {fault}")
    by_rank = gather_objects(message, world)
    ranks_of: dict[str, list[str]] = {}
    for rank, one in enumerate(by_rank):
        if one is not None:
            ranks_of.setdefault(one[1], []).append(str(rank))
    kind = ValueError if all(is_of_input for is_of_input, _ in filter(None, by_rank)) else RuntimeError
    raise kind("; ".join(f"rank {', '.join(ranks)}: {words}" for words, ranks in ranks_of.items())) from fault


def read_on_first_rank(read: Callable[[], T], world: Axis) -> T:
    """The result of the first rank's `read`, on every rank, or its error. Collective.

    Else thousands of ranks would ask the file system for thousands of files each.
    """
    result: T | Exception | None = None
    if world.is_first:
        try:
            result = read()
        except (ValueError, OSError) as fault:
            result = fault
        except Exception as error:
            # In words, because not every error can be pickled.
            result = RuntimeError(f"{type(error).__name__}: {error}")
    result = broadcast_object(result, world)
    if isinstance(result, Exception):
        raise result
    return cast(T, result)
