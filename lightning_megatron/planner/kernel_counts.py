"""What an operation takes of a device, for the time model (`measured_time`): FLOPs by kind of kernel, and bytes that it
reads and writes.

    products, fp8 products    FLOPs
    edges, grouped edges      FLOPs of a product [M, K] by [K, N], dense or of experts, times 1/M + 1/N + 1/K
    attention                 FLOPs of a fused kernel, whose backward recomputes the scores
    moved bytes               of all other kernels, one by one, as torch runs them
    grouped products          number of products of experts
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

# A fused attention kernel recomputes the weights in its backward. Source: Dao, arXiv 2307.08691, section 4.1.
FLASH_BACKWARD = 2.5
_ATEN = torch.ops.aten
# They read as much as they return.
_CHOSEN = frozenset({_ATEN.embedding, _ATEN.gather, _ATEN.index, _ATEN.index_select, _ATEN.nll_loss_forward})
# They read and write as much of their first argument as they have of the others.
_SCATTERED = frozenset(
    {_ATEN.index_add_, _ATEN.index_copy_, _ATEN.index_put_, _ATEN.scatter_, _ATEN.scatter_add_, _ATEN._index_put_impl_}
)
# They do not read what they write to.
_OVERWRITTEN = frozenset({_ATEN.copy_, _ATEN.fill_, _ATEN.zero_})


def product_counts(packet: Any, args: tuple[Any, ...], output: Tensor, flops: float) -> dict[str, float]:
    """Counts of a matrix product of so many FLOPs."""
    kind = "fp8 products" if packet is _ATEN._scaled_mm else "products"
    if packet is _ATEN.convolution or not flops:
        return {kind: flops}
    is_grouped = packet is _ATEN._grouped_mm
    # All experts' rows are in one dim.
    num_groups = args[1].shape[0] if is_grouped and output.dim() == 2 else 1
    edges = flops * (num_groups / output.shape[-2] + 1 / output.shape[-1]) + 2 * output.numel()
    if is_grouped:
        return {kind: flops, "grouped edges": edges, "grouped products": 1}
    return {kind: flops, "edges": edges}


def attention_counts(packet: Any, flops: float) -> dict[str, float]:
    """Counts of a fused attention kernel of so many FLOPs, of which a backward has twice those of its forward."""
    return {"attention": flops * (FLASH_BACKWARD / 2 if "backward" in str(packet) else 1)}


def other_counts(func: Any, args: tuple[Any, ...], output: Any) -> dict[str, float]:
    """Counts of an operation that is no product."""
    if not _has_kernel(func):
        return {}
    packet = func.overloadpacket
    written = sum(map(_num_bytes, _tensors((output,))))
    if packet in _CHOSEN:
        return {"moved bytes": 2 * written}
    if packet in _SCATTERED:
        return {"moved bytes": 3 * sum(map(_num_bytes, _tensors(args[1:])))}
    read = sum(map(_num_bytes, _tensors(args[_first_read(func) :])))
    return {"moved bytes": read + written}


@cache
def _has_kernel(func: Any) -> bool:
    """Whether an operation reads or writes numbers: a view and an allocation do not."""
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
    return not is_view and "empty" not in func._schema.name and func.overloadpacket is not _ATEN._unsafe_view


@cache
def _first_read(func: Any) -> int:
    """Index of the first argument that an operation reads: some only write to it, or make another like it."""
    name = func._schema.name
    return int(func.overloadpacket in _OVERWRITTEN or name.endswith("_like") or name.startswith("aten::new_"))


def _tensors(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    for one in arguments:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from (inner for inner in one if isinstance(inner, Tensor))


def _num_bytes(x: Tensor) -> int:
    """Bytes of a tensor; those that a dim repeats count once."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
