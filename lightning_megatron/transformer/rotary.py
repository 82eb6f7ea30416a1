"""Rotary position embedding: pairs of features of queries and keys turn by an angle that grows with the position.

Feature i of the first half of the rotated part makes a pair with feature i of the second half, and turns by
position * base^(-i / pairs). Features past the rotated part stay. Angles are computed in float64, once for a call.
Source: Su et al., arXiv 2104.09864, section 3.2.2 (there neighbours make a pair; the order of features is free).
"""

import torch
from torch import Tensor


def angles(positions_BS: Tensor, pairs: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles: float64 [B, S, pairs] each."""
    exponents_R = torch.arange(pairs, dtype=torch.float64, device=positions_BS.device) / max(pairs, 1)
    angles_BSR = positions_BS.double().unsqueeze(-1) * base**-exponents_R
    return angles_BSR.cos(), angles_BSR.sin()


def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Writes `x` [..., D], turned by the angles [..., pairs], to `out`; turned back if `sin` is negated."""
    pairs = cos.shape[-1]
    out.copy_(x)
    if pairs == 0:
        return
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    out[..., :pairs].mul_(cos).addcmul_(second, sin, value=-1)
    out[..., pairs : 2 * pairs].mul_(cos).addcmul_(first, sin)
