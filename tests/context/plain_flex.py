"""Plays the part of FlexAttention's kernels, whose backward is one of CUDA alone."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, FlexKernelOptions


def plain_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
    *,
    kernel_options: FlexKernelOptions,
    return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]:
    """What torch's documentation says of `flex_attention`, all scores materialised, by autograd."""
    assert return_aux.lse and (enable_gqa or query.shape[1] == key.shape[1])
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    sizes = (*query.shape[:3], key.shape[2])
    places = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
    scores = query @ key.mT * scale
    if score_mod is not None:
        scores = score_mod(scores, *places)
    seen = block_mask.mask_mod(*places)
    lse = scores.masked_fill(~seen, -torch.inf).logsumexp(dim=-1)
    # Of a query that sees no key neither the output nor a gradient is nan.
    shift = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
    weights = (scores.masked_fill(~seen, -torch.inf) - shift).exp()
    return weights @ value, AuxOutput(lse=lse)
