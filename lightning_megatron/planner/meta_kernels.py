"""What devices do and meta tensors do not: autocast of products, fused attention, grouped products, fused norms.

torch's autocast passes meta tensors by, its `scaled_dot_product_attention` materialises scores, its RMS norm takes
several operations, and its grouped product takes bfloat16 alone. A library adds the rest, for meta tensors alone and as
long as it is there. A mode for functions of torch would not do: it is off within backwards, where layers are computed
once more.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_megatron.moe.grouped_shapes import GROUPED_PRODUCT, grouped_shape
from lightning_megatron.precision.autocast import autocast_dtype

_ATEN = torch.ops.aten
_SDPA = _ATEN.scaled_dot_product_attention.default


def _lowered(args: Any) -> Any:
    """Arguments of a product in the dtype of autocast, where it is on."""
    first = next(one for one in tree_leaves(args) if isinstance(one, Tensor))
    if (dtype := autocast_dtype(first)) is None:
        return args

    def low(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    return tree_map_only(Tensor, low, args)


def _composed(product: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = _lowered((args, kwargs))
    return product.decompose(*args, **kwargs)


def _added(multiply: Callable[[Tensor, Tensor], Tensor], *args: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    bias, left, right = _lowered(args)
    product = multiply(left, right)
    product = product if alpha == 1 else product.mul_(alpha)
    return product.add_(bias, alpha=beta) if beta else product


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    query, key, value = _lowered((query, key, value))
    # GPUs have no kernel in float64, none for grouped queries in float32, and the one below has none for the rest.
    is_grouped = enable_gqa and query.dtype not in (torch.float16, torch.bfloat16)
    is_trained = attn_mask is not None and attn_mask.requires_grad
    is_double = query.dtype == torch.float64
    if is_double or is_grouped or is_trained or query.dim() != 4 or value.shape[-1] != query.shape[-1]:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        scored: Tensor = _SDPA.decompose(query, key, value, attn_mask, dropout_p, is_causal, **options)
        return scored
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # Every kernel adds numbers to scores.
        attn_mask = query.new_zeros(()).where(attn_mask, -torch.inf)
    output: Tensor
    output, _ = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    return output


def _rms_normed(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    # A layer norm's kernel reads and writes as much, besides a mean.
    normed, _, rstd = torch.native_layer_norm(x, shape, weight, None, eps or 0.0)
    return normed, rstd


KERNELS = torch.library.Library("aten", "IMPL")
for _name in ("linear", "matmul", "conv1d", "conv2d", "conv3d"):
    KERNELS.impl(_name, partial(_composed, getattr(_ATEN, _name).default), "AutogradMeta")
KERNELS.impl("addmm", partial(_added, torch.mm), "AutogradMeta")
KERNELS.impl("baddbmm", partial(_added, torch.bmm), "AutogradMeta")
KERNELS.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
KERNELS.impl("_fused_rms_norm", _rms_normed, "AutogradMeta")
KERNELS.impl(GROUPED_PRODUCT, grouped_shape, "Meta", allow_override=True)
