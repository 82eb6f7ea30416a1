"""Collectives over the rows of a matrix that run in chunks, each beside the compute on another chunk.

    compute_on_gathered    gather 0 │ gather 1  │ gather 2  │           every compute but the last hides a gather
                                    │ compute 0 │ compute 1 │ compute 2
    scatter_computed       compute 0 │ compute 1 │ compute 2 │            every compute but the first hides a scatter
                                     │ scatter 0 │ scatter 1 │ scatter 2

A chunk has as many rows of each rank as of the others, so what lands is put in the order of the ranks. `compute` takes
rows and gives as many; it may raise: messages in flight land first. T rows of all d ranks, I and O columns.
Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition, ASPLOS 2023.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.comm.collectives import Pending
from lightning_megatron.mesh import Axis

Compute = Callable[[Tensor], Tensor]
"""What is made of rows [N, I]: [N, O]."""


def compute_on_gathered(x_TI: Tensor, axis: Axis, num_chunks: int, compute: Compute) -> Tensor:
    """What `compute` makes of the rows of all ranks, in their order, [T, O], from this rank's rows [T/d, I]."""
    if axis.size == 1 or num_chunks == 1:
        return compute(collectives.all_gather(x_TI, axis))
    chunks, num_done = x_TI.chunk(num_chunks), 0
    in_flight = [collectives.all_gather(chunks[0], axis, wait=False)]
    try:
        for index, own in enumerate(chunks):
            in_flight += [collectives.all_gather(one, axis, wait=False) for one in chunks[index + 1 : index + 2]]
            part = compute(in_flight.pop(0).wait())
            if not index:
                whole = part.new_empty((axis.size, len(x_TI), *part.shape[1:]))
            whole[:, num_done : num_done + len(own)] = part.view(axis.size, len(own), *part.shape[1:])
            num_done += len(own)
    finally:
        _land(in_flight)
    return whole.flatten(0, 1)


def scatter_computed(x_TI: Tensor, axis: Axis, num_chunks: int, compute: Compute) -> Tensor:
    """This rank's rows [T/d, O] of the sum over the axis of what `compute` makes of rows [T, I] on each rank."""
    if axis.size == 1 or num_chunks == 1:
        return collectives.reduce_scatter(compute(x_TI), axis)
    in_flight: list[Pending] = []
    try:
        for chunk in x_TI.unflatten(0, (axis.size, len(x_TI) // axis.size)).chunk(num_chunks, dim=1):
            in_flight.append(collectives.reduce_scatter(compute(chunk.flatten(0, 1)), axis, wait=False))
    finally:
        _land(in_flight)
    return torch.cat([pending.output for pending in in_flight])


def _land(in_flight: list[Pending]) -> None:
    for pending in in_flight:
        pending.wait()
