"""Casts to float8: scales are powers of two that fill the format's range, nothing overflows, and NaN stays."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.precision.cast import E4M3, E5M2, Operand, amax_of, cast, largest, scale_of
from tests.precision.decast import decast

both_formats = pytest.mark.parametrize("dtype", [E4M3, E5M2])


@both_formats
@given(amax=st.floats(2.0**-90, 2.0**90), margin=st.integers(0, 3))
def test_a_scale_is_the_largest_power_of_two_that_keeps_the_amax_in_range(
    dtype: torch.dtype, amax: float, margin: int
) -> None:
    value = torch.tensor(amax)
    scale = float(scale_of(value, largest(dtype), margin))
    assert math.frexp(scale)[0] == 0.5
    assert float(value) * scale * 2**margin <= largest(dtype) * (1 + 1e-6)
    assert float(value) * scale * 2**margin * 2 > largest(dtype) * (1 - 1e-6)


@both_formats
@pytest.mark.parametrize("width", [torch.float32, torch.bfloat16])
def test_a_cast_rounds_once(dtype: torch.dtype, width: torch.dtype) -> None:
    x = (torch.randn(64, 16) * torch.randn(64, 1).exp() * 1e-4).to(width)
    scale = scale_of(amax_of(x), largest(dtype), 0)
    # In float64 nothing is rounded before the cast.
    wanted = (x.double() * scale.double()).to(dtype)
    assert torch.equal(cast(x, scale, dtype), wanted.view(torch.uint8))
    # Another scale would have given other bytes.
    assert not torch.equal(cast(x, scale / 2, dtype), wanted.view(torch.uint8))


@both_formats
def test_what_is_beyond_the_range_becomes_the_largest_number(dtype: torch.dtype) -> None:
    x = torch.tensor([[1e9, -1e9, 1.0]])
    values = cast(x, torch.tensor(1.0), dtype).view(dtype).float()
    assert values.tolist() == [[largest(dtype), -largest(dtype), 1.0]]


@both_formats
def test_zeros_and_tiny_numbers_come_back_and_nan_and_infinity_make_nan(dtype: torch.dtype) -> None:
    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        scale = scale_of(amax_of(x), largest(dtype), 0)
        return decast(Operand(cast(x, scale, dtype), scale.reciprocal()), dtype)

    assert torch.equal(there_and_back(torch.zeros(2, 3)), torch.zeros(2, 3))
    tiny = torch.tensor([[2.0**-80, 0.0]])
    assert torch.equal(there_and_back(tiny), tiny)
    for bad in (torch.nan, torch.inf):
        assert there_and_back(torch.tensor([[bad, 1.0]])).isnan().any()


def test_a_tensor_of_no_elements_has_amax_zero() -> None:
    assert amax_of(torch.zeros(0, 4)).item() == 0.0


def test_the_bytes_are_row_major_whatever_the_strides() -> None:
    x = torch.randn(8, 16).t()
    assert cast(x, torch.tensor(1.0), E4M3).is_contiguous()
    assert cast(torch.ones(()).expand(4, 8), torch.tensor(1.0), E4M3).is_contiguous()
