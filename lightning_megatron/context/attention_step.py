"""What a kernel of attention is asked for: the queries of one group of ranks meet the keys of another.

A kernel gives the part of the attention that these keys make, and its log-sum-exp; `merge_` adds parts together. Its
backward takes the output and the log-sum-exp of the whole, so that the gradients of parts just add up.

B batch, A query heads, G key heads (A is a multiple of it), Q query rows, K key rows, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_megatron.context.context_layout import AttentionBlock, MaskSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class DropoutKeys:
    """Which weights of attention are dropped."""

    keys: Tensor
    """Random key of each query row of each head here, int64 [B or 1, A, Q]; a key's column is its position."""
    probability: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RelativePositionBias:
    """What is added to scores for the distance of a key from a query."""

    table: Tensor
    """Learned, [buckets, A]."""
    bucket: Callable[[Tensor], Tensor]
    """Position of the key less that of the query, int64, to its bucket."""


class Mask(NamedTuple):
    """Which keys of a block its queries see."""

    added: Tensor
    """To scores, [queries, keys]: 0, or -inf where a key is not seen."""
    blind: Tensor | None
    """The queries that see none, bool [queries]; None where there is no such."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionStep:
    """What beside queries, keys and values says how a group's queries meet another's keys.

    Calls that share a step share its masks; so do steps with another bias or dropout_keys.
    """

    blocks: tuple[AttentionBlock, ...]
    query_positions: Tensor
    """In the segment, int64 [Q]; -1 where no token."""
    key_positions: Tensor
    """In the segment, int64 [K]; -1 where no token."""
    mask_spec: MaskSpec
    scale: float
    dropout_keys: DropoutKeys | None = None
    bias: RelativePositionBias | None = None
    cache: dict[object, Any] = field(default_factory=dict)
    """What kernels make once, of blocks, positions and mask_spec, for all calls and all steps that share it."""

    def mask(self, block: AttentionBlock, dtype: torch.dtype) -> Mask:
        """The mask of a block that has one."""
        # Blocks of one shape and distance, as the tiles of a window are, share it.
        name = ("mask", self.distance(block), block.num_queries, block.num_keys, dtype)
        if name not in self.cache:
            visible = self.mask_spec.is_visible(
                self.query_positions[block.query_row :][: block.num_queries],
                self.key_positions[block.key_row :][: block.num_keys],
            )
            added = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
            blind = ~visible.any(dim=1)
            self.cache[name] = Mask(added, blind if bool(blind.any()) else None)
        mask: Mask = self.cache[name]
        return mask

    def distance(self, block: AttentionBlock) -> int:
        """How far a block's first query lies behind its first key."""
        query_positions, key_positions = self._host_positions
        return query_positions[block.query_row] - key_positions[block.key_row]

    @cached_property
    def _host_positions(self) -> tuple[list[int], list[int]]:
        # Of a device this waits: once for all blocks.
        return self.query_positions.tolist(), self.key_positions.tolist()


class AttentionGradients(NamedTuple):
    """A step's parts of the gradients, in float32 or wider."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor | None


class Kernel(Protocol):
    """Attention of queries [B, A, Q, D] to keys and values [B, G, K, D]."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, step: AttentionStep) -> tuple[Tensor, Tensor]:
        """Output [B, A, Q, D] and log-sum-exp [B, A, Q] of these keys alone, in float32 or wider.

        A query that sees none of them has output 0 and log-sum-exp -inf.
        """

    def backward(
        self,
        grad: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        lse: Tensor,
        step: AttentionStep,
    ) -> AttentionGradients:
        """These keys' part of the gradients, from the output of the whole attention, its gradient and log-sum-exp."""


def merge_(output: Tensor, lse: Tensor, new_output: Tensor, new_lse: Tensor) -> None:
    """Adds the attention [B, A, Q, D] of more keys to what is there, by its log-sum-exp [B, A, Q]; in place."""
    # Weights from the difference add up to 1 however large scores are. Neither saw a key: -inf less -inf is nan.
    weight = torch.sigmoid(new_lse - lse).nan_to_num_(0.0).to(output.dtype)
    output.lerp_(new_output.to(output.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Float32, or the dtype if that is wider: what parts are added up in."""
    return torch.promote_types(dtype, torch.float32)
