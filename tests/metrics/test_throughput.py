"""Speed is arithmetic, and a peak is known for a device or it is not."""

import pytest

from lightning_megatron.metrics.throughput import PEAKS, Speed, peak_flops


def test_speed_is_work_over_seconds_and_mfu_its_share_of_all_devices() -> None:
    speed = Speed(num_tokens=1000, num_flops=6e15, seconds=2.0, num_devices=4)
    assert speed.tokens_per_second == 500
    assert speed.flops_per_second == 3e15
    assert speed.mfu(peak_flops=1e15) == 0.75


def test_one_device_does_its_share_and_hfu_counts_recomputation() -> None:
    speed = Speed(num_tokens=1, num_flops=6e15, seconds=2.0, num_devices=4, num_recomputed_flops=2e15)
    assert speed.tflops_per_device == 750
    assert (speed.mfu(1e15), speed.hfu(1e15)) == (0.75, 1.0)


def test_the_published_run_of_a_trillion_parameters_has_its_published_share() -> None:
    # arXiv 2104.04473, table 1: 163 TFLOP/s per A100 is 52 % of its peak.
    speed = Speed(num_tokens=1, num_flops=3072 * 163e12, seconds=1.0, num_devices=3072)
    assert round(speed.mfu(peak_flops("NVIDIA A100-SXM4-80GB", "bf16-mixed")), 2) == 0.52


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989.4),
        ("NVIDIA H100 80GB HBM3", "transformer-engine", 1978.9),
        ("NVIDIA H200", "bf16-true", 989.4),
        ("NVIDIA A100-SXM4-40GB", "16-mixed", 312),
        ("NVIDIA A100-SXM4-40GB", "transformer-engine", 0),
        ("Tesla V100-SXM2-32GB", "16-mixed", 125),
        ("NVIDIA B200", "bf16-mixed", 2250),
        ("NVIDIA GB200", "bf16-mixed", 2500),
        ("NVIDIA L40S", "bf16-mixed", 362),
        ("NVIDIA L4", "bf16-mixed", 121),
        ("NVIDIA A10", "bf16-mixed", 125),
        ("NVIDIA A10G", "bf16-mixed", 70),
    ],
)
def test_the_peak_of_a_known_device_is_that_of_its_data_sheet(name: str, precision: str, tflops: float) -> None:
    assert peak_flops(name, precision) == tflops * 1e12


@pytest.mark.parametrize("name", ["cpu", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB", "NVIDIA L40"])
def test_a_device_that_only_looks_like_a_known_one_has_no_peak(name: str) -> None:
    assert peak_flops(name, "bf16-mixed") == 0


def test_full_precision_has_no_peak() -> None:
    assert peak_flops("NVIDIA H200", "32-true") == 0


def test_every_peak_has_a_source() -> None:
    assert all(peak.source for peak in PEAKS)
