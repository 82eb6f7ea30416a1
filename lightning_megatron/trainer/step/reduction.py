"""Reductions that Lightning and its callbacks ask for, by the names and operations that they know."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis

_NAMES_OF_OPERATIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
}


def reduced(tensor: Tensor, axis: Axis, reduce_op: Any) -> Tensor:
    """The tensor reduced over an axis. Raises ValueError for an operation of another name."""
    name = reduce_op.lower() if isinstance(reduce_op, str) else _NAMES_OF_OPERATIONS[reduce_op]
    match name:
        case "mean" | "avg":
            summed = collectives.all_reduce(tensor if tensor.is_floating_point() else tensor.float(), axis)
            return summed / axis.size
        case "sum" | "max" | "min":
            return collectives.all_reduce(tensor, axis, name)
    raise ValueError(f"reduce_op ({reduce_op!r}) must be one of mean, avg, sum, max, min")
