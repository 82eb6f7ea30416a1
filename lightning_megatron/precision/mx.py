"""MXFP8: casts to float8 in blocks of 32 numbers along the inner dim of a GEMM, one power of two a block, and the GEMM
of what they make.

    scale = 2^ceil(log2(amax / largest)), one byte (E8M0: the exponent + 127)    values = round(x / scale)

A block's amax is that of its 32 numbers, so no rank asks another one. Scales are rounded up: by the floor of the MX
specification the largest numbers of a block would saturate. Bytes are those of torchao's cast in its mode RCEIL, whose
rule is Transformer Engine's. A GPU that has the units multiplies float8 and scales. Elsewhere operands are decast,
which rounds nothing, and multiplied in float32: each product of two of them is exact, and their sum is float32's.
Sources: OCP Microscaling Formats 1.0, section 6.3; Mishra et al., arXiv 2506.08027.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.precision.cast import Operand, largest

BLOCK = 32
"""Numbers that share a scale."""

_BIAS, _NAN, _LARGEST_EXPONENT = 127, 255, 254
_MANTISSA_BITS = 23
_HALF = 1 << (_MANTISSA_BITS - 1)
# Scales lie in tiles of 128 x 4, in a tile 32 rows of 4 x 4. Source: cuBLAS documentation, 1D block scaling factors.
_TILE_ROWS, _TILE_PARTS, _TILE_COLUMNS = 128, 4, 4
UNITS = (10, 0)
"""The lowest compute capability of a GPU that multiplies float8 by scales of blocks."""


def cast_blocks(x_MK: Tensor, dtype: torch.dtype) -> Operand:
    """Bytes of the float8 values [M, K] and of the scales [M, K/32] of blocks along the last dim."""
    blocks = x_MK.unflatten(-1, (-1, BLOCK))
    exponents = _exponents(torch.linalg.vector_norm(blocks, torch.inf, dim=-1, dtype=torch.float32), largest(dtype))
    # Blocks of zeros have exponent 0, and so have numbers below 2^-118 or so, which torchao's cast makes zeros.
    factors = torch.where(exponents == 0, 1.0, torch.exp2(_BIAS - exponents.float()))
    factors = torch.where(exponents == _NAN, torch.nan, factors)
    limit = largest(dtype)
    # In the dtype of the numbers: powers of two round nothing that is not zero in float8.
    values = (blocks * factors.unsqueeze(-1).to(x_MK.dtype)).clamp_(-limit, limit).to(dtype)
    # Row-major also where the numbers are those of a transposed tensor.
    return Operand(values.contiguous().flatten(-2).view(torch.uint8), exponents.to(torch.uint8).contiguous())


def _exponents(amax: Tensor, largest_value: float) -> Tensor:
    """The biased exponents of the smallest powers of two by which blocks of these amaxes fit, int32 of their shape."""
    bits = (amax / largest_value).view(torch.int32)
    exponents, mantissas = bits >> _MANTISSA_BITS, bits & ((1 << _MANTISSA_BITS) - 1)
    # Below the smallest normal number the exponent is 0, and the first bit of the mantissa stands for 2^-127.
    is_above = mantissas > torch.where(exponents == 0, _HALF, 0)
    rounded = (exponents + is_above.int()).clamp(max=_LARGEST_EXPONENT)
    return torch.where(amax.isnan(), _NAN, rounded)


def multiply_blocks(
    left_MK: Operand, left_dtype: torch.dtype, right_NK: Operand, right_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """left right^T, [M, N] in `dtype`."""
    if not _has_units(left_MK.values.device):
        return decast_blocks(left_MK, left_dtype).mm(decast_blocks(right_NK, right_dtype).t()).to(dtype)
    assert left_MK.inverse_scale is not None and right_NK.inverse_scale is not None
    product: Tensor = torch._scaled_mm(
        left_MK.values.view(left_dtype),
        right_NK.values.view(right_dtype).t(),
        scale_a=in_tiles(left_MK.inverse_scale).view(torch.float8_e8m0fnu),
        scale_b=in_tiles(right_NK.inverse_scale).view(torch.float8_e8m0fnu),
        out_dtype=dtype,
    )
    return product


def decast_blocks(operand: Operand, dtype: torch.dtype) -> Tensor:
    """The numbers that an operand stands for, float32 of its shape; NaN in blocks that had one."""
    assert operand.inverse_scale is not None
    scales = operand.inverse_scale.view(torch.float8_e8m0fnu).float()
    blocks: Tensor = operand.values.view(dtype).float().unflatten(-1, (-1, BLOCK))
    return (blocks * scales.unsqueeze(-1)).flatten(-2)


def in_tiles(scales: Tensor) -> Tensor:
    """Scales [R, C] in the order in which a GPU reads them, R and C filled up to tiles, flat."""
    rows, columns = scales.shape
    filled = F.pad(scales, (0, -columns % _TILE_COLUMNS, 0, -rows % _TILE_ROWS))
    tiles = filled.view(-1, _TILE_PARTS, _TILE_ROWS // _TILE_PARTS, filled.shape[1] // _TILE_COLUMNS, _TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def _has_units(device: torch.device) -> bool:
    # A meta tensor stands for one on a GPU.
    return device.type == "meta" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= UNITS)
