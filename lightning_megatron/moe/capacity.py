"""How many tokens of a rank an expert takes at most, and which of its tokens it takes.

The share of each rank is counted by itself, so with a capacity the result depends on how tokens are spread over ranks;
without one (dropless) it does not. A choice that an expert does not take is none (-1), and its weight is not given to
the token's other experts.

T tokens of this rank, K choices of each, E experts.
Source: Lepikhin et al., arXiv 2006.16668, section 2.2 (capacity); Fedus et al., arXiv 2101.03961, section 2.2 (factor).
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_megatron.moe.permute import sort_by_expert

Keeps = Literal["probability", "position"]
"""Which choices stay: those of the greatest weights, among equals the first tokens; or those of the first tokens."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What an expert takes of each rank's tokens. Raises ValueError, telling all faults at once."""

    factor: float
    # times the even share of all choices, rounded up to whole tokens
    keeps: Keeps = "probability"
    # which choices stay where there are more
    pads: bool = False
    # fill up with zeros to the capacity: every size is known in advance, and no rank waits to learn one

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
        if self.keeps not in get_args(Keeps):
            choices = ", ".join(map(repr, get_args(Keeps)))
            faults.append(f"capacity keeps ({self.keeps!r}) must be one of {choices}")
        return faults

    def token_faults(self, num_tokens: int, num_chosen: int, num_experts: int) -> list[str]:
        """What is wrong with it for microbatches of so many tokens of a rank, one sentence each."""
        share = self._share(num_tokens, num_chosen, num_experts)
        if not num_tokens or share >= 1:
            return []
        return [
            f"capacity factor ({self.factor}) for {num_tokens} tokens of a rank, {num_chosen} chosen of {num_experts} "
            f"experts, is {float(share):.3g} tokens an expert and must be at least 1; use a factor of at least "
            f"{_rounded_up(Fraction(num_experts, num_tokens * num_chosen))}, {-(-num_tokens // share)} tokens, "
            "or no capacity"
        ]

    def num_rows(self, num_tokens: int, num_chosen: int, num_experts: int) -> int:
        """Tokens that an expert takes of a rank at most. Raises ValueError where the share is below one token."""
        if faults := self.token_faults(num_tokens, num_chosen, num_experts):
            raise ValueError("\n".join(faults))
        return math.ceil(self._share(num_tokens, num_chosen, num_experts))

    def _share(self, num_tokens: int, num_chosen: int, num_experts: int) -> Fraction:
        # The factor as it is written: 1.1 as a float is a little more, and would round a whole share up by one.
        return Fraction(str(self.factor)) * num_tokens * num_chosen / num_experts

    def kept(self, experts_TK: Tensor, weights_TK: Tensor, num_experts: int) -> Tensor:
        """The chosen experts with -1 in place of choices that do not stay, [T, K]."""
        num_rows = self.num_rows(len(experts_TK), experts_TK.shape[1], num_experts)
        flat = experts_TK.flatten()
        if self.keeps == "probability":
            first = weights_TK.detach().flatten().argsort(descending=True, stable=True)
        else:
            first = torch.arange(len(flat), device=flat.device)
        by_expert = sort_by_expert(flat[first, None], num_experts)
        choices = first[by_expert.choices_N]
        starts_E = by_expert.counts_E.cumsum(0) - by_expert.counts_E
        # Choices of no expert stand last; the place that they get here is of no matter.
        place = torch.arange(len(flat), device=flat.device) - starts_E[flat[choices].clamp(min=0)]
        stays = torch.empty_like(flat, dtype=torch.bool)
        stays[choices] = place < num_rows
        return torch.where(stays, flat, -1).view_as(experts_TK)


def _rounded_up(share: Fraction) -> str:
    return str(math.ceil(share * 1000) / 1000)
