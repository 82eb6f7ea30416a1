"""Capacity spelled out: every expert looks through its choices one by one."""

import math
from fractions import Fraction

from torch import Tensor

from lightning_megatron.moe.capacity import Keeps

E = 4


def kept_by_hand(
    experts_TK: Tensor,
    weights_TK: Tensor,
    segments: list[int],
    positions: list[int],
    factor: str,
    mean: int,
    keeps: Keeps,
) -> list[list[int]]:
    """In every sequence (-1 is padding) every expert looks through its choices one by one."""
    kept = [[-1] * experts_TK.shape[1] for _ in experts_TK]
    for segment in set(segments) - {-1}:
        tokens = sorted((t for t, each in enumerate(segments) if each == segment), key=lambda t: positions[t])
        most = math.ceil(Fraction(factor) * len(tokens) * mean / E)
        for expert in range(E):
            mine = [(t, k) for t in tokens for k in range(experts_TK.shape[1]) if experts_TK[t, k] == expert]
            if keeps == "probability":
                mine.sort(key=lambda place: -float(weights_TK[place]))
            for t, k in mine[:most]:
                kept[t][k] = expert
    return kept
