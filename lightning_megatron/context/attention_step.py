"""One step of ring attention: the queries of one group of ranks attend to the keys of another.

A kernel computes the attention to these keys alone and its log-sum-exp; `merge_` merges steps. Its backward takes
output and log-sum-exp over all keys, so that the gradients of steps add up.

B batch, A query heads, G key heads (A is a multiple of it), Q query rows, K key rows, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_megatron.context.context_layout import AttentionBlock, MaskSpec
from lightning_megatron.handles import handle_of


@dataclass(frozen=True, kw_only=True, eq=False)
class DropoutKeys:
    """Dropout of the attention weights of a step."""

    keys: Tensor
    """Random key of each query row and head: int64 [B or 1, A, Q]. The column of a key is its position."""
    probability: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RelativePositionBias:
    """Bias of scores by the distance of a key from a query."""

    table: Tensor
    """Learned biases, [buckets, A]."""
    bucket: Callable[[Tensor], Tensor]
    """Maps the position of the key minus that of the query, int64, to a bucket."""
    bucket_handle: Tensor = field(init=False)
    """Handle of `bucket`, for compiled code."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bucket_handle", handle_of(self.bucket))


class Mask(NamedTuple):
    """Mask of a block."""

    added: Tensor
    """Added to scores, [queries, keys]: 0, or -inf where a key is not seen."""
    blind: Tensor
    """Queries that see no key: bool [queries]. Whether there are any is not asked: the host would wait."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionStep:
    """Arguments of a kernel besides queries, keys and values.

    Calls that share a step share its masks; so do steps with another bias or dropout.
    """

    blocks: tuple[AttentionBlock, ...]
    query_positions: Tensor
    """Position of each query in its segment: int64 [Q] on the host; -1 for no token."""
    key_positions: Tensor
    """Position of each key in its segment: int64 [K] on the host; -1 for no token."""
    mask_spec: MaskSpec
    scale: float
    dropout_keys: DropoutKeys | None = None
    bias: RelativePositionBias | None = None
    softcap: float = 0.0
    """Bound c of scores, which become c tanh(score / c); 0: none."""
    cache: dict[object, Any] = field(default_factory=dict)
    """Values that kernels derive from blocks, positions and mask_spec, shared by calls and steps."""

    def positions_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Positions of queries and keys on a device; few kernels need them there."""
        name = ("positions", device)
        if name not in self.cache:
            queries, keys = self.query_positions, self.key_positions
            moved = queries.to(device, non_blocking=True)
            self.cache[name] = moved, moved if queries.equal(keys) else keys.to(device, non_blocking=True)
        positions: tuple[Tensor, Tensor] = self.cache[name]
        return positions

    def mask(self, block: AttentionBlock, dtype: torch.dtype, device: torch.device) -> Mask:
        """Mask of a block of kind "masked"."""
        # Blocks of one shape and distance, such as the tiles of a window, share a mask.
        name = ("mask", self.distance(block), block.num_queries, block.num_keys, dtype)
        if name not in self.cache:
            query_positions, key_positions = self.positions_on(device)
            visible = self.mask_spec.is_visible(
                query_positions[block.query_row :][: block.num_queries],
                key_positions[block.key_row :][: block.num_keys],
            )
            added = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
            self.cache[name] = Mask(added, ~visible.any(dim=1))
        mask: Mask = self.cache[name]
        return mask

    def distance(self, block: AttentionBlock) -> int:
        """Position of a block's first query minus that of its first key."""
        return int(self.query_positions[block.query_row] - self.key_positions[block.key_row])


class AttentionGradients(NamedTuple):
    """Gradients of one step, in float32 or wider."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor | None


class BackwardInputs(NamedTuple):
    """Tensors from which the backward of attention computes gradients."""

    grad: Tensor
    """Gradient of the output."""
    queries: Tensor
    keys: Tensor
    values: Tensor
    output: Tensor
    lse: Tensor
    """Log-sum-exp of the scores of each query."""


class Kernel(Protocol):
    """Attention of queries [B, A, Q, D] to keys and values [B, G, K, D]."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, step: AttentionStep) -> tuple[Tensor, Tensor]:
        """Output [B, A, Q, D] and log-sum-exp [B, A, Q] over these keys alone, in float32 or wider.

        A query that sees no key has output 0 and log-sum-exp -inf.
        """

    def backward(self, inputs: BackwardInputs, step: AttentionStep) -> AttentionGradients:
        """Gradients of this step, from output, gradient and log-sum-exp over all keys."""


def merge_(output: Tensor, lse: Tensor, new_output: Tensor, new_lse: Tensor) -> None:
    """Merges the attention [B, A, Q, D] to more keys into `output` by its log-sum-exp [B, A, Q]; in place."""
    # Weights from the difference sum to 1 however large scores are. Without any key -inf minus -inf is nan.
    weight = torch.sigmoid(new_lse - lse).nan_to_num_(0.0).to(output.dtype)
    output.lerp_(new_output.to(output.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))


def capped_(scores: Tensor, softcap: float) -> Tensor:
    """Scores under a soft cap, in place."""
    return scores.div_(softcap).tanh_().mul_(softcap) if softcap else scores


def merge_sinks_(output: Tensor, lse: Tensor, sinks_A: Tensor) -> None:
    """Adds a key of value 0 and of these scores to the attention [B, A, Q, D] and its log-sum-exp; in place.

    Source: Xiao et al., arXiv 2309.17453, section 3.2, with a learned score in the place of a token.
    """
    new_lse = torch.logaddexp(lse, sinks_A.to(lse.dtype)[:, None])
    output.mul_((lse - new_lse).exp().unsqueeze(-1))
    lse.copy_(new_lse)


def sink_gradients(grad: Tensor, output: Tensor, lse: Tensor, sinks_A: Tensor) -> Tensor:
    """Gradients of the scores of sinks [A], of output and log-sum-exp over all keys and the sink."""
    weights = (sinks_A.to(lse.dtype)[:, None] - lse).exp()
    inner = (grad.to(lse.dtype) * output.to(lse.dtype)).sum(dim=-1)
    return -(weights * inner).sum(dim=(0, 2))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which steps are added up: float32, or `dtype` if that is wider."""
    return torch.promote_types(dtype, torch.float32)
