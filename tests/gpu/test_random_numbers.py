"""A GPU draws the CPU's random bits and masks, by Triton's kernels where Triton is, and numbers that round like its."""

import importlib.util

import pytest
import torch

from lightning_megatron.comm import rng
from tests.comm.test_random_kernels import SHAPES
from tests.gpu.devices import each_device


@each_device
def test_bits_and_masks_are_those_of_the_cpu(device: str) -> None:
    for of_keys, of_index in SHAPES:
        keys, index = torch.arange(-3, 97)[:35].repeat(60), torch.arange(2**40, 2**40 + 2000)
        keys, index = (x[: torch.Size(shape).numel()].view(shape) for x, shape in ((keys, of_keys), (index, of_index)))
        keys = rng.mix(keys)
        assert rng.bits(keys.to(device), index.to(device)).cpu().equal(rng.bits(keys, index))
        assert rng.bits(rng.key(7), index.to(device)).cpu().equal(rng.bits(rng.key(7), index))
    keys = rng.bits(3, torch.arange(900)).view(30, 30)
    for num_columns in (0, 5, 1030):
        for probability in (0.0, 0.1, 0.9):
            wanted = rng.keep_mask(keys, num_columns, probability, 11)
            assert rng.keep_mask(keys.to(device), num_columns, probability, 11).cpu().equal(wanted)
    assert not rng.keep_mask(keys, 64, 0.1).equal(rng.keep_mask(keys + 1, 64, 0.1))


@pytest.mark.gpu
def test_a_gpu_draws_them_by_tritons_kernels() -> None:
    assert importlib.util.find_spec("triton") is not None, "torch's builds for CUDA bring Triton"
    keys, index = torch.arange(64, device="cuda"), torch.arange(64, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        rng.bits(keys, index)
        rng.keep_columns(keys, index, 0.5)
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if "kernel" in event.key]
    assert sorted(kernels) == ["_bits_kernel", "_keep_kernel"]


@each_device
def test_normal_numbers_are_those_of_the_cpu_but_for_their_rounding(device: str) -> None:
    index = torch.arange(10_000)
    wanted, found = rng.normal(5, index), rng.normal(5, index.to(device)).cpu()
    # Logarithm, root and cosine in float64, each rounded by itself.
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    assert (rng.normal(6, index) - wanted).abs().mean() > 1
