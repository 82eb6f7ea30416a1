"""Causal attention in which a token sees itself and the tokens right before it, `window` in all.

Two windows or less are one masked attention. A longer sequence is cut into blocks of a window: a block sees itself and
the block before it, so that memory and time grow with S * window, not with S^2.

B batch, A heads, G key-value groups, S sequence, D head size, W window, N blocks but the first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

Masks = dict[tuple[object, ...], Tensor]


def is_visible(sequence: int, window: int, device: torch.device) -> Tensor:
    """Mask of the keys (columns) that each query (row) attends to, bool [S, S]; window 0: all before it."""
    positions = torch.arange(sequence, device=device)
    distance = positions[:, None] - positions
    return (distance >= 0) & (distance < window) if window else distance >= 0


def sliding_window_attention(
    queries: Tensor, keys: Tensor, values: Tensor, window: int, masks: Masks, *, scale: float | None = None
) -> Tensor:
    """Attention of queries [B, A, S, D] to keys and values [B, G, S, D], S above `window`: [B, A, S, D].

    `masks` caches what several layers of a call may share. `scale` is 1 / sqrt(D) where None.
    """
    # Kernels that take a mask do not take grouped queries.
    queries_per_group = queries.shape[1] // keys.shape[1]
    keys, values = (x.unsqueeze(2).expand(-1, -1, queries_per_group, -1, -1).flatten(1, 2) for x in (keys, values))
    sequence = queries.shape[2]
    if sequence <= 2 * window:
        mask = _shared(masks, sequence, sequence, window, queries)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    # Copies: views would keep all tokens alive besides the blocks.
    begin = [x[:, :, :window].clone() for x in (queries, keys, values)]
    first = F.scaled_dot_product_attention(begin[0], begin[1], begin[2], is_causal=True, scale=scale)
    padding = -sequence % window
    # Padding after the last token: no real query sees it.
    queries, keys, values = (F.pad(x, (0, 0, 0, padding)) for x in (queries, keys, values))
    blocks = queries[:, :, window:].unflatten(2, (-1, window))
    # Each block with the one before it: [B, A, N, D, 2 W].
    pairs = [x.unfold(2, 2 * window, window).transpose(-1, -2) for x in (keys, values)]
    # Blocks are samples of a batch.
    folded = [x.transpose(1, 2).flatten(0, 1) for x in (blocks, *pairs)]
    mask = _shared(masks, window, 2 * window, window, queries)
    rest = F.scaled_dot_product_attention(folded[0], folded[1], folded[2], attn_mask=mask, scale=scale)
    rest = rest.unflatten(0, (queries.shape[0], -1)).transpose(1, 2).flatten(2, 3)
    return torch.cat([first, rest[:, :, : sequence - window]], dim=2)


def _shared(masks: Masks, num_queries: int, num_keys: int, window: int, like: Tensor) -> Tensor:
    """Additive mask of the last `num_queries` of `num_keys` tokens: 0 or -inf."""
    key = (num_queries, num_keys, window, like.dtype)
    if (mask := masks.get(key)) is None:
        seen = is_visible(num_keys, window, like.device)[num_keys - num_queries :]
        mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)
        # Compiled layers share none: the first would be another one than those that find it here.
        if not torch.compiler.is_compiling():
            masks[key] = mask
    return mask
