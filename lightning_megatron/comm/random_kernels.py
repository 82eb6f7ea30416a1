"""Triton's kernels of random bits and of dropout masks: the numbers of `rng`, each tensor in one launch.

Torch alone takes 25 launches for bits and a dozen for each block of a mask, because it has no logical shift.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_megatron.comm import splitmix

_GOLDEN = tl.constexpr(splitmix.GOLDEN)
_MIX_1 = tl.constexpr(splitmix.MIX_1)
_MIX_2 = tl.constexpr(splitmix.MIX_2)
# Elements of a program.
_BLOCK = 1024


def bits(keys: Tensor | int, index: Tensor) -> Tensor:
    """`rng.bits` of keys and indices that broadcast to at most three dims."""
    if isinstance(keys, int):
        return _bits(keys, index, index)
    return _bits(0, *torch.broadcast_tensors(keys, index))


def _bits(key: int, keys: Tensor, index: Tensor) -> Tensor:
    """Bits of indices under the keys, or where both are one tensor under the key."""
    assert index.dim() <= 3, f"bits of {index.dim()} dims"
    drawn = torch.empty(index.shape, dtype=torch.int64, device=index.device)
    sizes, of_keys, of_index = ((one,) * (3 - index.dim()) for one in (1, 0, 0))
    sizes, of_keys, of_index = (*sizes, *index.shape), (*of_keys, *keys.stride()), (*of_index, *index.stride())
    if drawn.numel():
        _bits_kernel[(triton.cdiv(drawn.numel(), _BLOCK),)](
            drawn, key, keys, index, drawn.numel(), *sizes[1:], *of_keys, *of_index, keys is index, _BLOCK
        )
    return drawn


def keep_columns(keys_R: Tensor, columns_C: Tensor, threshold: int) -> Tensor:
    """Whether the bits of a row and a column reach the threshold: bool [R, C]."""
    keep_RC = torch.empty(len(keys_R), len(columns_C), dtype=torch.bool, device=keys_R.device)
    if keep_RC.numel():
        grid = len(keys_R), triton.cdiv(len(columns_C), _BLOCK)
        _keep_kernel[grid](
            keep_RC.view(torch.uint8), keys_R.contiguous(), columns_C.contiguous(), len(columns_C), threshold, _BLOCK
        )
    return keep_RC


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    """`rng.mix`; a shift of int64 keeps the sign."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit(do_not_specialize=["key"])
def _bits_kernel(  # type: ignore[no-untyped-def]
    drawn,
    key,
    keys,
    index,
    size,
    size_1,
    size_2,
    keys_0,
    keys_1,
    keys_2,
    index_0,
    index_1,
    index_2,
    HAS_ONE_KEY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_in = place < size
    at_2, at_1, at_0 = place % size_2, place // size_2 % size_1, place // size_2 // size_1
    indices = tl.load(index + at_0 * index_0 + at_1 * index_1 + at_2 * index_2, mask=is_in, other=0)
    if not HAS_ONE_KEY:
        key = tl.load(keys + at_0 * keys_0 + at_1 * keys_1 + at_2 * keys_2, mask=is_in, other=0)
    tl.store(drawn + place, _mixed(_mixed(indices * _GOLDEN + key) + key), mask=is_in)


@triton.jit(do_not_specialize=["threshold"])
def _keep_kernel(keep, keys, columns, num_columns, threshold, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = place < num_columns
    column = tl.load(columns + place, mask=is_in, other=0)
    bits = _mixed(tl.load(keys + row) + column * _GOLDEN)
    tl.store(keep + row * num_columns + place, (bits >= threshold).to(tl.uint8), mask=is_in)
