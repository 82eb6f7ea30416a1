"""Capacity spelled out: every expert looks through its choices one by one."""

import math
from fractions import Fraction

from torch import Tensor

from lightning_megatron.moe.capacity import DropPolicy

E = 4


def drop_by_hand(
    expert_ids_TK: Tensor,
    probs_TK: Tensor,
    segments: list[int],
    positions: list[int],
    factor: str,
    mean: int,
    drop_policy: DropPolicy,
) -> list[list[int]]:
    """Experts of each token, -1 where dropped; a segment of -1 is padding."""
    accepted = [[-1] * expert_ids_TK.shape[1] for _ in expert_ids_TK]
    for segment in set(segments) - {-1}:
        tokens = sorted((t for t, each in enumerate(segments) if each == segment), key=lambda t: positions[t])
        most = math.ceil(Fraction(factor) * len(tokens) * mean / E)
        for expert in range(E):
            mine = [(t, k) for t in tokens for k in range(expert_ids_TK.shape[1]) if expert_ids_TK[t, k] == expert]
            if drop_policy == "probs":
                mine.sort(key=lambda choice: -float(probs_TK[choice]))
            for t, k in mine[:most]:
                accepted[t][k] = expert
    return accepted
