"""The sequences of a model call as groups of tokens that several ranks share, for routing and load balancing.

A group is one sequence (a row, or a packed document); its tokens lie on the ranks of two axes, the one that cuts tokens
before routers and cp, and never in two microbatches.
T tokens that this rank routes, E experts, P sequence groups and one more for padding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis


@dataclass(frozen=True, kw_only=True)
class RoutedTokens:
    """Tokens that one rank routes in one model call."""

    is_real_T: Tensor
    """Whether a token is none of padding: bool."""
    num_real: int
    """Number of tokens that are none of padding."""
    segments_T: Tensor
    """Sequence (packed: document) of each token, from 0, numbered alike on all ranks of the axes: int64."""
    lengths: tuple[int, ...]
    """Lengths of the sequences of the call in tokens, over all ranks."""
    positions_T: Tensor
    """Position of each token in its sequence: int64."""
    make_keys: Callable[[], Tensor]
    """Makes `keys_T`; few routers draw."""
    weights_T: Tensor | None
    """Weight of each token in the auxiliary losses: floating point; none where routers have no such losses."""
    axes: tuple[Axis, ...]
    """Axes that cut sequences: the one that cuts tokens before routers, and cp."""
    call: int = 0
    """Number of the model call within the step; recomputed for the backward, it is the same call. Routers do not count
    a call below 0."""
    is_packed: bool = False
    """Whether sequences are packed documents, so that data-parallel ranks may have different numbers of tokens."""
    handle: Tensor | None = None
    """Handle of these tokens and of the stream that they are of, for compiled code."""

    @property
    def is_counted(self) -> bool:
        return self.call >= 0

    @cached_property
    def keys_T(self) -> Tensor:
        """Random key of each token: int64."""
        return self.make_keys()

    @cached_property
    def sequence_groups(self) -> "SequenceGroups":
        """The sequence groups of the call, which all its routers share."""
        num = len(self.lengths)
        return SequenceGroups(
            ids_T=torch.where(self.is_real_T, self.segments_T, num), num_groups=num + 1, axes=self.axes
        )


@dataclass(frozen=True, kw_only=True)
class SequenceGroups:
    """The sequences of a call; sums over their tokens are over all ranks that share them, and known on each."""

    ids_T: Tensor
    """Group of each token, the last group for padding: int64."""
    num_groups: int
    """Number of groups, the one of padding included (P)."""
    axes: tuple[Axis, ...]
    """Axes that cut sequences."""

    @property
    def is_real_T(self) -> Tensor:
        return self.ids_T < self.num_groups - 1

    def sum(self, values_TE: Tensor) -> Tensor:
        """Sum of the values of each group's tokens: [P, E]."""
        sums_PE = values_TE.new_zeros(self.num_groups, values_TE.shape[1])
        return sum_over(sums_PE.index_add_(0, self.ids_T, values_TE), self.axes)

    def spread(self, values_PE: Tensor) -> Tensor:
        """For each token the value of its group: [T, E]."""
        return values_PE.index_select(0, self.ids_T)

    def gather(self, values_T: Tensor) -> Tensor:
        """Values of the tokens of all ranks that share the groups: [all T, ...]."""
        for axis in self.axes:
            values_T = collectives.all_gather(values_T, axis)
        return values_T

    def own_part(self, gathered_T: Tensor) -> Tensor:
        """This rank's part of a result of `gather`."""
        for axis in reversed(self.axes):
            gathered_T = collectives.shard_slice(gathered_T, axis)
        return gathered_T


def sum_over(values: Tensor, axes: tuple[Axis, ...]) -> Tensor:
    """Sum of `values` over all ranks of the axes, on each of them."""
    for axis in axes:
        values = collectives.all_reduce(values, axis)
    return values


def routing_map(expert_ids_TK: Tensor, num_experts: int) -> Tensor:
    """Routing map: 1 where a token goes to an expert, else 0; the expert -1 is none: int64 [T, E]."""
    mask_TE = expert_ids_TK.new_zeros(expert_ids_TK.shape[0], num_experts)
    return mask_TE.scatter_add_(1, expert_ids_TK.clamp(min=0), (expert_ids_TK >= 0).long())
