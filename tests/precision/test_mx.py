"""Blocks of 32 numbers are cast to the nearest values under the smallest scale that fits them, and multiplied."""

from bisect import bisect_left
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_megatron.precision import mx
from lightning_megatron.precision.cast import E4M3, E5M2, Operand
from lightning_megatron.precision.gemm import Fp8Gemm
from lightning_megatron.precision.mx import BLOCK, cast_blocks, decast_blocks, in_tiles, multiply_blocks
from lightning_megatron.precision.scaling import BlockScaling

both_formats = pytest.mark.parametrize("dtype", [E4M3, E5M2])
# Of the largest: sums of at most 96 float32 products in another order.
TOLERANCE = 1e-5
# Bits of exponent and mantissa, the exponent's bias, and the number of finite magnitudes: e4m3 has a NaN and no
# infinity, e5m2 is as IEEE has it. Source: OCP Microscaling Formats 1.0.
FORMATS = {E4M3: (4, 3, 7, 127), E5M2: (5, 2, 15, 124)}


def magnitudes(dtype: torch.dtype) -> list[Fraction]:
    """The finite magnitudes of a format in order, each at the index that its byte is."""
    _, mantissa, bias, number = FORMATS[dtype]
    values = []
    for byte in range(number):
        exponent, fraction = byte >> mantissa, Fraction(byte % (1 << mantissa), 1 << mantissa)
        values.append(Fraction(2) ** (max(exponent, 1) - bias) * (fraction + (exponent > 0)))
    return values


def plain_cast(block: list[float], dtype: torch.dtype) -> tuple[int, list[int]]:
    """The scale's byte and the bytes of a block, in exact arithmetic.

    Section 6.3 of the specification, the scale rounded up as arXiv 2506.08027 has it.
    """
    values = magnitudes(dtype)
    amax = max(abs(Fraction(x)) for x in block)
    exponent = -127
    while amax > values[-1] * Fraction(2) ** exponent:
        exponent += 1
    found = []
    for x in block:
        scaled = abs(Fraction(x)) / Fraction(2) ** exponent
        above = min(bisect_left(values, scaled), len(values) - 1)
        below = max(above - 1, 0)
        to_above, to_below = values[above] - scaled, scaled - values[below]
        # Halfway between two, the one with an even byte.
        is_above = to_above < to_below or (to_above == to_below and above % 2 == 0)
        negative = 128 if x < 0 or str(x) == "-0.0" else 0
        found.append(negative + (above if is_above else below))
    return exponent + 127, found


def bytes_of(x: Tensor | None) -> bytes:
    assert x is not None and x.dtype == torch.uint8
    return bytes(x.flatten().tolist())


floats = st.floats(-(2.0**60), 2.0**60, width=32) | st.floats(-8, 8, width=32)


@both_formats
@given(block=st.lists(floats, min_size=BLOCK, max_size=BLOCK))
def test_a_block_is_cast_as_exact_arithmetic_casts_it(dtype: torch.dtype, block: list[float]) -> None:
    operand = cast_blocks(torch.tensor([block]), dtype)
    scale, values = plain_cast(block, dtype)
    if scale:
        assert (bytes_of(operand.inverse_scale)[0], list(bytes_of(operand.values))) == (scale, values)
    else:
        # They are below 2^-110, and zeros.
        assert bytes_of(operand.inverse_scale) == b"\0" and not decast_blocks(operand, dtype).any()


def numbers() -> Tensor:
    """Four blocks whose numbers are up to 2^15 apart, from 2^-121 to 2^119."""
    i = torch.arange(4 * BLOCK)
    x = ((i * 37) % 64 - 31) * torch.exp2(((i * 5) % 11 - 6).float())
    return x.view(4, BLOCK) * torch.tensor([[1.0], [3.0], [2.0**-120], [2.0**110]])


# What torchao 0.18.0 makes of them: its to_mx with ScaleCalculationMode.RCEIL.
VECTORS = {
    E4M3: (
        "7f8108ed",
        "b044fa48eb45c8be59b15aa05660cc6cbf6baa6822db27cc7cb0f638ea39d936"
        "34aa48f448e14454b95aaa5991d36ac76db76a00e227d527c27b31f13ae239cc"
        "b044a248eb45c8be59b15aa05608cc6cbf6baa6822db27cc24b0f638ea39d936"
        "40b553a852ec5060c466b5649cdf1ed278c27600ee32e032ce2f3cfc45ee44d8",
    ),
    E5M2: (
        "787a01e6",
        "d45ef960f25ee0db68d469cc676ce272dc72d1704dea50e27ad4f758f158e857"
        "56d160f660ec5e66d869d168c4e671e072d87100ed50e650dd7a54f459ed58e2"
        "d45ecd60f25ee0db68d469cc6740e272dc72d1704dea50e24ed4f758f158e857"
        "5cd666d065f2646cde6fd66ecaec4be578dd7700f355ec55e3545afa5ef35ee8",
    ),
}


@both_formats
@pytest.mark.parametrize("width", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_torchao(dtype: torch.dtype, width: torch.dtype) -> None:
    # Their numbers have at most 8 bits, so that a bfloat16 holds them.
    operand = cast_blocks(numbers().to(width), dtype)
    assert (bytes_of(operand.inverse_scale).hex(), bytes_of(operand.values).hex()) == VECTORS[dtype]


@both_formats
def test_zeros_stay_and_nan_and_infinity_are_not_hidden(dtype: torch.dtype) -> None:
    blocks = torch.ones(4, BLOCK)
    blocks[0], blocks[1, 3], blocks[2, 3] = 0.0, torch.nan, -torch.inf
    operand = cast_blocks(blocks, dtype)
    assert bytes_of(operand.inverse_scale)[:3] == bytes([0, 255, 254])
    found = decast_blocks(operand, dtype)
    assert not found[0].any() and found[1].isnan().any() and not found[2].isfinite().all()
    # A block next to them is as it is without them.
    assert torch.equal(found[3], blocks[3])


def test_no_number_of_a_block_saturates() -> None:
    """By the specification's floor an amax just below a power of two would lose up to an eighth."""
    amax = torch.tensor(2.0 - 2.0**-7)
    found = decast_blocks(cast_blocks(amax.expand(1, BLOCK), E4M3), E4M3)
    assert (found - amax).abs().max() <= amax * 2.0**-4
    saturated = 448 * 2.0**-8
    assert amax - saturated > amax * 2.0**-4


def test_scales_lie_as_a_gpu_reads_them() -> None:
    rows, columns = 130, 6
    scales = torch.randint(0, 255, (rows, columns), dtype=torch.uint8)
    flat = in_tiles(scales)
    assert flat.shape == (256 * 8,)
    for row in range(rows):
        for column in range(columns):
            tile = (row // 128) * 2 + column // 4
            inside = (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4
            assert flat[tile * 512 + inside] == scales[row, column]
    assert int((flat != 0).sum()) == int((scales != 0).sum())


class Three:
    """A product, its weight and operands, over 40 tokens: not a multiple of 32."""

    def __init__(self, gradient_dtype: torch.dtype) -> None:
        self.dtype = gradient_dtype
        self.gemm = Fp8Gemm(x=BlockScaling(E4M3), weight=BlockScaling(E4M3), gradient=BlockScaling(gradient_dtype))
        self.weight = nn.Parameter(torch.randn(2, 48, 64))
        # Numbers of very different size in a block of tokens, but not in one of features.
        sizes = torch.linspace(0, -16, 40).exp2().unsqueeze(1)
        self.x, self.grad = torch.randn(40, 64) * sizes, torch.randn(40, 96) / sizes
        self.x_TI = self.gemm.cast_input(self.x, is_training=True)
        self.grad_TO = self.gemm.cast_gradient(self.grad)

    def products(self) -> tuple[Tensor, Tensor, Tensor]:
        bias = torch.ones(2, 48)
        return (
            self.gemm.forward(self.x_TI, self.weight, bias, torch.float32, is_training=True),
            self.gemm.input_gradient(self.grad_TO, self.weight, torch.float32),
            self.gemm.weight_gradient(self.grad_TO, self.x_TI, self.weight),
        )


def stood_for(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What the casts of a tensor stand for whose blocks lie along its last dim, filled up with zeros; float64."""
    filled = nn.functional.pad(x, (0, -x.shape[-1] % BLOCK))
    return decast_blocks(cast_blocks(filled, dtype), dtype)[:, : x.shape[-1]].double()


@pytest.mark.parametrize("gradient_dtype", [E4M3, E5M2])
def test_each_product_equals_that_of_casts_along_its_own_inner_dim(gradient_dtype: torch.dtype) -> None:
    three = Three(gradient_dtype)
    weight_OI = three.weight.detach().flatten(0, 1)
    y, dx, dw = (product.double() for product in three.products())
    wanted_dw = stood_for(three.grad.t(), gradient_dtype) @ stood_for(three.x.t(), E4M3).t()
    for found, wanted in (
        (y, stood_for(three.x, E4M3) @ stood_for(weight_OI, E4M3).t() + 1),
        (dx, stood_for(three.grad, gradient_dtype) @ stood_for(weight_OI.t(), E4M3).t()),
        (dw.flatten(0, 1), wanted_dw),
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE * float(wanted.abs().max()))
    # Transposes of the casts along features are other numbers.
    of_rows = stood_for(three.grad, gradient_dtype).t() @ stood_for(three.x, E4M3)
    assert (of_rows - wanted_dw).abs().max() > 100 * TOLERANCE * wanted_dw.abs().max()


def test_outputs_have_the_given_dtype_and_inputs_are_saved_as_they_are() -> None:
    three = Three(E5M2)
    for dtype in (torch.float32, torch.bfloat16):
        assert three.gemm.input_gradient(three.grad_TO, three.weight, dtype).dtype == dtype
    assert three.x_TI == Operand(three.x, None) and three.grad_TO == Operand(three.grad, None)


def test_a_weight_is_cast_once_a_step_each_way() -> None:
    ways: list[str] = []

    class Counted(BlockScaling):
        def rows(self, x_TC: Operand) -> Operand:
            ways.append("rows")
            return super().rows(x_TC)

        def columns(self, x_TC: Operand) -> Operand:
            ways.append("columns")
            return super().columns(x_TC)

    three = Three(E5M2)
    three.gemm = Fp8Gemm(x=BlockScaling(E4M3), weight=Counted(E4M3), gradient=BlockScaling(E5M2))
    for _ in range(3):
        three.products()
    assert ways == ["rows", "columns"]
    three.gemm.forget()
    three.products()
    assert ways == ["rows", "columns"] * 2


def test_units_get_what_the_emulation_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's product for a GPU, whose scales lie in tiles, is that of the same operands."""
    three, calls = Three(E5M2), []
    wanted = three.products()

    def of_units(left: Tensor, right: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert left.is_contiguous() and right.t().is_contiguous()
        assert left.shape[1] % BLOCK == 0 and right.shape[1] % 16 == 0
        sides = []
        for values, scales in ((left, scale_a), (right.t(), scale_b)):
            assert scales.dtype == torch.float8_e8m0fnu and scales.is_contiguous()
            rows, columns = values.shape[0], values.shape[1] // BLOCK
            places = in_tiles(torch.arange(rows * columns).view(rows, columns) + 1)
            plain = torch.empty(rows * columns)
            plain[places[places > 0] - 1] = scales.float()[places > 0]
            sides.append((values.float().unflatten(1, (-1, BLOCK)) * plain.view(rows, columns, 1)).flatten(1))
        calls.append(out_dtype)
        return (sides[0] @ sides[1].t()).to(out_dtype)

    three.gemm.forget()
    monkeypatch.setattr(mx, "_has_units", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", of_units)
    for found, product in zip(three.products(), wanted, strict=True):
        assert torch.equal(found, product)
    assert calls == [torch.float32] * 3


def test_meta_tensors_are_multiplied_as_on_a_gpu() -> None:
    left, right = (cast_blocks(torch.empty(rows, 64, device="meta"), E4M3) for rows in (40, 96))
    product = multiply_blocks(left, E4M3, right, E4M3, torch.bfloat16)
    assert product.is_meta and product.shape == (40, 96) and product.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("gradient_dtype", [E4M3, E5M2])
def test_products_on_a_gpu_equal_those_on_the_cpu(gradient_dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < mx.UNITS:
        pytest.skip("needs a GPU of compute capability 10.0")
    three = Three(gradient_dtype)
    wanted = three.products()
    three.gemm.forget()
    three.weight = nn.Parameter(three.weight.detach().cuda())
    three.x_TI, three.grad_TO = (Operand(x.values.cuda(), None) for x in (three.x_TI, three.grad_TO))

    def products() -> tuple[Any, ...]:
        return (
            three.gemm.forward(three.x_TI, three.weight, None, torch.float32, is_training=True) + 1,
            three.gemm.input_gradient(three.grad_TO, three.weight, torch.float32),
            three.gemm.weight_gradient(three.grad_TO, three.x_TI, three.weight),
        )

    for found, product in zip(products(), wanted, strict=True):
        torch.testing.assert_close(found.cpu(), product, rtol=0, atol=1e-4 * float(product.abs().max()))
