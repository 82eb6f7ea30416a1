"""How many tokens of a sequence an expert takes at most, and which.

Shares are counted within a sequence (packed: a document), as nothing cuts a sequence out of its pool: so what is
dropped does not depend on the layout. A choice that an expert does not take is none (-1), and its weight is not given
to the token's other experts.

T tokens of this rank, N of all ranks that share its sequences, K choices of each, E experts, P pools, M = N * K.
Source: Lepikhin et al., arXiv 2006.16668, section 2.2 (capacity); Fedus et al., arXiv 2101.03961, section 2.2 (factor).
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_megatron.moe.sequence_groups import SequenceGroups

DropPolicy = Literal["probs", "position"]
"""Which choices stay: those of the greatest weights, among equals the first tokens; or those of the first tokens."""


@dataclass(frozen=True, kw_only=True)
class ExpertCapacity:
    """What an expert takes of each sequence. Raises ValueError, telling all faults at once."""

    factor: float
    """Times the even share of the sequence's choices, rounded up to whole tokens."""
    drop_policy: DropPolicy = "probs"
    """Which choices stay where there are more."""
    pad_to_capacity: bool = False
    """Fill up with zeros to what may come: every size is known in advance, and no rank waits to learn one. Where
    documents are packed, and ranks with other documents share the experts, sizes are told as without it."""

    def __post_init__(self) -> None:
        if faults := self.faults():
            raise ValueError("\n".join(faults))

    def faults(self) -> list[str]:
        """Every rule that this breaks, one sentence each."""
        faults = []
        if not (math.isfinite(self.factor) and self.factor > 0.0):
            faults.append(
                f"capacity factor ({self.factor}) must be a number above 0; leave capacity out to drop nothing"
            )
        if self.drop_policy not in get_args(DropPolicy):
            choices = ", ".join(map(repr, get_args(DropPolicy)))
            faults.append(f"capacity drop_policy ({self.drop_policy!r}) must be one of {choices}")
        return faults

    def length_faults(self, num_tokens: int, num_chosen: int, num_experts: int) -> list[str]:
        """What is wrong with it for sequences of so many tokens, one sentence each."""
        share = self._share(num_chosen, num_experts) * num_tokens
        if share >= 1:
            return []
        least = math.ceil(Fraction(num_experts, num_tokens * num_chosen) * 1000) / 1000
        return [
            f"capacity factor ({self.factor}) for sequences of {num_tokens} tokens, {num_chosen} chosen of "
            f"{num_experts} experts, is {float(share):.3g} tokens an expert and must be at least 1; use a factor of at "
            f"least {least}, sequences of {math.ceil(1 / self._share(num_chosen, num_experts))} tokens, or no capacity"
        ]

    def num_rows(self, num_tokens: int, num_chosen: int, num_experts: int) -> int:
        """Tokens that an expert takes of a sequence of so many at most."""
        return math.ceil(self._share(num_chosen, num_experts) * num_tokens)

    def _share(self, num_chosen: int, num_experts: int) -> Fraction:
        # The factor as it is written: 1.1 as a float is a little more, and would round a whole share up by one.
        return Fraction(str(self.factor)) * num_chosen / num_experts

    def kept(
        self,
        expert_ids_TK: Tensor,
        probs_TK: Tensor,
        positions_T: Tensor,
        pools: SequenceGroups,
        *,
        num_chosen: int,
        num: int,
    ) -> Tensor:
        """The chosen experts with -1 in place of choices that do not stay, [T, K].

        `num` experts, of which a token chooses `num_chosen` (in the mean). Talks over the axes of the pools.
        """
        expert_ids_NK, ids_N, positions_N = (
            pools.gather(values) for values in (expert_ids_TK, pools.ids_T, positions_T)
        )
        num_pools, is_real_N = pools.num_pools - 1, ids_N < pools.num_pools - 1
        sizes_P = torch.zeros(pools.num_pools, dtype=torch.int64, device=ids_N.device)
        share = self._share(num_chosen, num)
        most_P = sizes_P.index_add_(0, ids_N, torch.ones_like(ids_N)) * share.numerator
        most_P = (most_P + share.denominator - 1) // share.denominator
        # A group is an expert of a pool; behind all of them is that of choices that are none.
        groups_NK = torch.where(
            (expert_ids_NK >= 0) & is_real_N[:, None], ids_N[:, None] * num + expert_ids_NK, num_pools * num
        )
        groups_M = groups_NK.flatten()
        # Sorted by group, in it by weight if asked, in equal ones by position: stable sorts, the last word first.
        order_M = positions_N[:, None].expand_as(expert_ids_NK).flatten().argsort(stable=True)
        if self.drop_policy == "probs":
            probs_M = pools.gather(probs_TK.detach()).flatten()
            order_M = order_M[probs_M[order_M].argsort(descending=True, stable=True)]
        order_M = order_M[groups_M[order_M].argsort(stable=True)]
        sorted_M = groups_M[order_M]
        first_M = torch.searchsorted(sorted_M, sorted_M)
        places_M = torch.arange(len(order_M), device=order_M.device) - first_M
        stays_M = torch.empty_like(groups_M, dtype=torch.bool)
        stays_M[order_M] = (places_M < most_P[sorted_M // num]) & (sorted_M < num_pools * num)
        return pools.own_part(torch.where(stays_M.view_as(expert_ids_NK), expert_ids_NK, -1))
