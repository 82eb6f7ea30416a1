"""Expert capacity: how many tokens of a sequence an expert accepts, and which it drops.

Capacity is counted within a sequence (packed: a document), which no layout tears: so what is dropped does not depend on
the layout. A dropped assignment becomes -1, and its probability is not given to the token's other experts.

T tokens of this rank, N of all ranks that share its sequences, K experts of each token, E experts, P sequence groups,
M = N * K.
Source: Lepikhin et al., arXiv 2006.16668, section 2.2 (capacity); Fedus et al., arXiv 2101.03961, section 2.2 (factor).
"""

import math
from fractions import Fraction
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.moe.sequence_groups import SequenceGroups

DropPolicy = Literal["probs", "position"]
"""Which tokens stay: those of the highest router probabilities, ties to the earlier; or the earliest tokens."""


@config_dataclass
class ExpertCapacity:
    """Tokens that an expert accepts of each sequence. Raises ValueError that lists all errors at once."""

    factor: float
    """Capacity of an expert as a multiple of its even share of a sequence's tokens, rounded up to whole tokens."""
    drop_policy: DropPolicy = "probs"
    """Which tokens stay where an expert has more than its capacity: "probs", those of the highest router probability,
    or "position", the earliest in the sequence."""
    pad_to_capacity: bool = False
    """Whether every expert's input is padded with zeros to its capacity, so that no rank waits to learn a size. Where
    ranks with other packed documents share the experts, sizes are exchanged as without it."""

    def __post_init__(self) -> None:
        if faults := self.faults():
            raise ValueError("\n".join(faults))

    def faults(self) -> list[str]:
        """Errors of this capacity, one sentence each."""
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
        """Errors of this capacity for sequences of num_tokens tokens, one sentence each."""
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
        """Most tokens that an expert accepts of a sequence of num_tokens."""
        return math.ceil(self._share(num_chosen, num_experts) * num_tokens)

    def _share(self, num_chosen: int, num_experts: int) -> Fraction:
        # The factor as it is written: 1.1 as a float is a little more, and would round an even share up by one.
        return Fraction(str(self.factor)) * num_chosen / num_experts

    def drop(
        self,
        expert_ids_TK: Tensor,
        probs_TK: Tensor,
        positions_T: Tensor,
        groups: SequenceGroups,
        *,
        num_chosen: int,
        num: int,
    ) -> Tensor:
        """The experts of each token with -1 where it was dropped, [T, K].

        A token has `num_chosen` (in the mean) of `num` experts. Talks over the axes of the sequence groups.
        """
        expert_ids_NK, ids_N, positions_N = (
            groups.gather(values) for values in (expert_ids_TK, groups.ids_T, positions_T)
        )
        num_groups, is_real_N = groups.num_groups - 1, ids_N < groups.num_groups - 1
        sizes_P = torch.zeros(groups.num_groups, dtype=torch.int64, device=ids_N.device)
        share = self._share(num_chosen, num)
        most_P = sizes_P.index_add_(0, ids_N, torch.ones_like(ids_N)) * share.numerator
        most_P = (most_P + share.denominator - 1) // share.denominator
        # A bucket is one expert of one sequence; the last bucket holds assignments to no expert.
        groups_NK = torch.where(
            (expert_ids_NK >= 0) & is_real_N[:, None], ids_N[:, None] * num + expert_ids_NK, num_groups * num
        )
        groups_M = groups_NK.flatten()
        # Sorted by bucket, then by probability under "probs", then by position: stable sorts, the last key first.
        order_M = positions_N[:, None].expand_as(expert_ids_NK).flatten().argsort(stable=True)
        if self.drop_policy == "probs":
            probs_M = groups.gather(probs_TK.detach()).flatten()
            order_M = order_M[probs_M[order_M].argsort(descending=True, stable=True)]
        order_M = order_M[groups_M[order_M].argsort(stable=True)]
        sorted_M = groups_M[order_M]
        first_M = torch.searchsorted(sorted_M, sorted_M)
        position_M = torch.arange(len(order_M), device=order_M.device) - first_M
        stays_M = torch.empty_like(groups_M, dtype=torch.bool)
        stays_M[order_M] = (position_M < most_P[sorted_M // num]) & (sorted_M < num_groups * num)
        return groups.own_part(torch.where(stays_M.view_as(expert_ids_NK), expert_ids_NK, -1))
