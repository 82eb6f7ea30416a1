"""Tests of Triton's kernels of random numbers, interpreted on a CPU: the numbers are those that torch draws."""

from types import ModuleType

import pytest
import torch

from lightning_megatron.comm import rng

SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((7, 1), (1030,)),
    ((2, 1, 5), (3, 1)),
    ((0,), ()),
    ((4,), (4,)),
]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    pytest.importorskip("triton", reason="needs Triton: pip install triton")
    with pytest.MonkeyPatch.context() as patch:
        # Triton reads it where it finds a kernel.
        patch.setenv("TRITON_INTERPRET", "1")
        from lightning_megatron.comm import random_kernels
    return random_kernels


@pytest.mark.parametrize(("of_keys", "of_index"), SHAPES)
def test_bits_of_a_kernel_are_those_of_torch(
    kernels: ModuleType, of_keys: tuple[int, ...], of_index: tuple[int, ...]
) -> None:
    keys, index = torch.arange(-3, 97)[:35].repeat(60), torch.arange(2**40, 2**40 + 2000)
    keys, index = (x[: torch.Size(shape).numel()].view(shape) for x, shape in ((keys, of_keys), (index, of_index)))
    assert kernels.bits(rng.mix(keys), index).equal(rng.bits(rng.mix(keys), index))
    assert kernels.bits(rng.key(7), index).equal(rng.bits(rng.key(7), index))
    # Every second row and column of a larger tensor.
    strided = rng.mix(torch.arange(48)).view(6, 8)[::2, ::2]
    assert kernels.bits(strided, strided.T[0, 0]).equal(rng.bits(strided, strided[0, 0]))


@pytest.mark.parametrize("num_columns", [0, 5, 1030])
def test_a_mask_of_a_kernel_is_that_of_torch(kernels: ModuleType, num_columns: int) -> None:
    keys, columns = rng.bits(3, torch.arange(9)), torch.arange(num_columns).flip(0)
    for probability in (0.0, 0.1, 0.9):
        threshold = rng._threshold(probability)
        keep = kernels.keep_columns(keys, columns, threshold)
        assert keep.equal(rng.keep_columns(keys, columns, probability))
        assert keep.equal(rng.keep_columns(keys, columns, 0.5)) == (num_columns == 0)
