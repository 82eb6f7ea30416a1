"""Products of matrices whose rows are gathered or scattered over an axis, fused by torch's symmetric memory.

Each rank reads its peers' memory itself, over NVLink, while it multiplies what it has: the asynchronous tensor
parallelism of torch. Its operators fall back to what the hardware has. T rows of all d ranks, I and O columns.
Source: torch 2.13, `torch.distributed._symmetric_memory`.
"""

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory

from lightning_megatron.mesh import Axis


def gathered_product(x_TI: Tensor, right_IO: Tensor, axis: Axis) -> Tensor:
    """The product [T, O] of the rows of all ranks, in their order, from this rank's [T/d, I]."""
    product: Tensor = torch.ops.symm_mem.fused_all_gather_matmul(
        x_TI, [right_IO], 0, _name_of(x_TI, axis), return_A=False
    )[1][0]
    return product


def scattered_product(x_TI: Tensor, right_IO: Tensor, axis: Axis) -> Tensor:
    """This rank's rows [T/d, O] of the sum over the axis of products [T, O]."""
    product: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x_TI, right_IO, "sum", 0, _name_of(x_TI, axis))
    return product


def _name_of(x: Tensor, axis: Axis) -> str:
    assert axis.group is not None
    if x.is_cuda:
        # Once for each group, and nothing after that.
        _symmetric_memory.enable_symm_mem_for_group(axis.group.group_name)
    return axis.group.group_name
