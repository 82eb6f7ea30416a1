"""What a router knows of its tokens, and sums over pools of them that several ranks share.

A pool is a sequence of a model call (a row, or a packed document); its tokens lie on the ranks of two axes, that over
which routers have their tokens cut and cp, never in two microbatches. Legend: T tokens that this rank routes, E
experts, P pools and one more, which is that of padding.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis


@dataclass(frozen=True, kw_only=True)
class RoutedTokens:
    """The tokens that one rank routes in one model call, its part of the stream."""

    is_real_T: Tensor
    """bool: no padding."""
    segments_T: Tensor
    """int64: the sequence (packed: the document) of each, from 0, numbered alike on all ranks of the axes."""
    lengths: tuple[int, ...]
    """Of the sequences of the call, in tokens of all ranks."""
    positions_T: Tensor
    """int64: the place of each in its sequence."""
    keys_T: Tensor
    """int64: the random key of each."""
    weights_T: Tensor
    """floating: how much each counts in the auxiliary losses."""
    axes: tuple[Axis, ...]
    """That cut sequences: that over which routers have their tokens cut, and cp."""
    call: int = 0
    """Which model call of the step this is; made again for the backward, it is the same call. Below 0: one that routers
    do not count, because nothing is learnt from it."""
    is_packed: bool = False
    """Sequences are documents: replicas, whose batches have one shape, may have different numbers of tokens."""

    @property
    def is_counted(self) -> bool:
        return self.call >= 0

    @cached_property
    def pools(self) -> "SequenceGroups":
        """The sequences of the call, which all its routers share."""
        num = len(self.lengths)
        return SequenceGroups(
            ids_T=torch.where(self.is_real_T, self.segments_T, num), num_pools=num + 1, axes=self.axes
        )


@dataclass(frozen=True, kw_only=True)
class SequenceGroups:
    """The sequences of a call as pools of tokens; every sum is that of all ranks that share them, on each of them."""

    ids_T: Tensor
    """int64: of each token; the last one is that of padding."""
    num_pools: int
    # P, with that of padding
    axes: tuple[Axis, ...]
    """That cut sequences."""

    @property
    def is_real_T(self) -> Tensor:
        return self.ids_T < self.num_pools - 1

    def sum(self, values_TE: Tensor) -> Tensor:
        """The sum of the values of each pool's tokens: [P, E]."""
        sums_PE = values_TE.new_zeros(self.num_pools, values_TE.shape[1])
        return sum_over(sums_PE.index_add_(0, self.ids_T, values_TE), self.axes)

    def spread(self, values_PE: Tensor) -> Tensor:
        """For each token what its pool has: [T, E]."""
        return values_PE.index_select(0, self.ids_T)

    def gather(self, values_T: Tensor) -> Tensor:
        """The values of the tokens of all ranks that share the pools: [all T, ...]."""
        for axis in self.axes:
            values_T = collectives.all_gather(values_T, axis)
        return values_T

    def own_part(self, gathered_T: Tensor) -> Tensor:
        """This rank's rows of what `gather` made."""
        for axis in reversed(self.axes):
            gathered_T = collectives.shard_slice(gathered_T, axis)
        return gathered_T


def sum_over(values: Tensor, axes: tuple[Axis, ...]) -> Tensor:
    """The sum of `values` over all ranks of the axes, on each of them."""
    for axis in axes:
        values = collectives.all_reduce(values, axis)
    return values


def routing_map(expert_ids_TK: Tensor, num_experts: int) -> Tensor:
    """1 where an expert is among a token's chosen, which are -1 for none: int64 [T, E]."""
    mask_TE = expert_ids_TK.new_zeros(expert_ids_TK.shape[0], num_experts)
    return mask_TE.scatter_add_(1, expert_ids_TK.clamp(min=0), (expert_ids_TK >= 0).long())
