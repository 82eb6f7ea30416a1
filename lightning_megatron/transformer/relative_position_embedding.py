"""Relative positions: a learned number for each head and each range of distances, added to scores.

One table serves all layers of a stack. Near distances have a bucket each, farther ones share buckets that grow with
the logarithm, and from `max_distance` on all are one.
Source: Raffel et al., arXiv 1910.10683, section 2.1.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn

from lightning_megatron.context.attention_step import RelativePositionBias
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Initial, shard_parameter


def relative_position_bucket(distance: Tensor, *, num_buckets: int, max_distance: int, is_causal: bool) -> Tensor:
    """The bucket, int64, of each distance (position of the key less that of the query).

    Keys before the query and after it have half of the buckets each, unless `is_causal`: then all are for those
    before, and those after it count as the query itself.
    """
    first: Tensor | int = 0
    if is_causal:
        steps = (-distance).clamp(min=0)
    else:
        num_buckets //= 2
        first, steps = (distance > 0).long() * num_buckets, distance.abs()
    num_near = num_buckets // 2
    # In float32, as the weights of published models have learned it: another rounding would move a bound.
    growth = torch.log(steps.clamp(min=1).float() / num_near) / math.log(max_distance / num_near)
    far = num_near + (growth * (num_buckets - num_near)).long()
    return first + torch.where(steps < num_near, steps, far.clamp(max=num_buckets - 1))


class RelativePositionEmbedding(nn.Module):
    """The table [num_buckets, A/tp] of a stack; called, it is the bias of the heads here."""

    def __init__(
        self, *, num_buckets: int, max_distance: int, num_heads: int, is_causal: bool, std: float, tp: Axis
    ) -> None:
        super().__init__()
        self.bucket = partial(
            relative_position_bucket, num_buckets=num_buckets, max_distance=max_distance, is_causal=is_causal
        )
        # Each rank of tp sees all tokens of its heads: it has full gradients.
        self.weight = shard_parameter((num_buckets, num_heads), initial=Initial(std=std), dim=1, axis=tp)

    def forward(self) -> RelativePositionBias:
        return RelativePositionBias(table=self.weight, bucket=self.bucket)
