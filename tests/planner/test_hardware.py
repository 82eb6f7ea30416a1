"""GPUs are known by name, or described by a file; errors in either are reported."""

from pathlib import Path

import pytest

from lightning_megatron.metrics.throughput import peak_flops
from lightning_megatron.planner.constants import fitted
from lightning_megatron.planner.hardware import gpu_of, gpu_of_device, known_gpus


def test_a_gpu_is_found_by_any_of_its_names() -> None:
    assert gpu_of("A100") is gpu_of("a100-80gb")
    assert gpu_of("h100").memory_gb == 80


@pytest.mark.parametrize("name", known_gpus())
def test_a_gpu_is_found_by_what_its_driver_calls_it(name: str) -> None:
    shown = {
        "v100-32gb": "Tesla V100-SXM2-32GB",
        "a100-40gb": "NVIDIA A100-SXM4-40GB",
        "a100-80gb": "NVIDIA A100-SXM4-80GB",
        "h100": "NVIDIA H100 80GB HBM3",
        "h100-96gb-500w": "NVIDIA H100 96GB",
    }
    found = gpu_of_device(shown.get(name, f"NVIDIA {name.upper()}"))
    # That one is the same chip under another limit of power, which its name does not tell.
    assert found == (None if name == "h100-96gb-500w" else gpu_of(name))


@pytest.mark.parametrize("name", ["cpu", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA L40"])
def test_a_device_that_only_looks_like_a_known_one_is_none(name: str) -> None:
    assert gpu_of_device(name) is None


def test_an_unknown_gpu_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'h1000'.*did you mean h100\?.*gb200.*YAML") as caught:
        gpu_of("h1000")
    assert all(name in str(caught.value) for name in known_gpus())


def test_every_known_gpu_says_where_its_numbers_are_from_and_measures_less_than_its_peak() -> None:
    for gpu in known_gpus().values():
        assert len(gpu.source) > 10
        assert 0.5 * gpu.half_tflops <= gpu.matmul_flops("half") / 1e12 < gpu.half_tflops
        assert 0.5 * gpu.double_tflops <= gpu.matmul_flops("double") / 1e12 <= gpu.double_tflops
        assert 0.5 * gpu.full_tflops <= gpu.matmul_flops("full") / 1e12 < gpu.full_tflops <= gpu.half_tflops / 2


@pytest.mark.parametrize(
    ("name", "driver_name"),
    [
        ("a100-80gb", "NVIDIA A100-SXM4-80GB"),
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("h200", "NVIDIA H200"),
        ("b200", "NVIDIA B200"),
        ("gb200", "NVIDIA GB200"),
    ],
)
def test_peaks_are_those_that_mfu_is_measured_against(name: str, driver_name: str) -> None:
    gpu = gpu_of(name)
    assert gpu.peak_flops("half") == peak_flops(driver_name, "bf16-mixed")
    assert gpu.peak_flops("fp8") == peak_flops(driver_name, "transformer-engine")


def test_a_file_describes_another_gpu(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("memory_gb: 64\nmemory_tb_per_second: 3.2\nhalf_tflops: 383\nnvlink_gb_per_second: 50\n")
    gpu = gpu_of(str(file))
    assert (gpu.name, gpu.memory_gb, gpu.gpus_per_node) == ("mine", 64, 8)
    # One of no family counts as the newest.
    for is_fp8 in (False, True):
        assert fitted().product_share(gpu.family, is_fp8=is_fp8) == fitted().product_share("blackwell", is_fp8=is_fp8)
    assert (gpu.timed_as("full"), gpu.timed_as("fp8")) == ("half", "fp8")
    file.write_text(f"{file.read_text()}full_tflops: 47.9\n")
    gpu = gpu_of(str(file))
    # Of no measured matmul in either: the usual share.
    assert gpu.timed_as("full") == "full" and gpu.matmul_flops("full") == pytest.approx(0.8 * 47.9e12)
    assert fitted().attention_share(gpu.family, "second") == fitted().attention_share("blackwell", "second")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("memory_gb: 64\n", "'memory_tb_per_second' is missing"),
        ("memory_gb: lots\nmemory_tb_per_second: 3\nhalf_tflops: 1\n", "must be a number"),
        ("memory_gb: 0\nmemory_tb_per_second: 3\nhalf_tflops: 1\n", "memory_gb (0) must be above 0"),
        ("memory_gb: 1\nmemory_tb_per_second: 3\nhalf_tflops: 1\nvram: 3\n", "'vram'"),
        ("memory_gb: 1\nmemory_tb_per_second: 3\nhalf_tflops: 1\nhalf_matmul_tflops: 2\n", "at most half_tflops"),
        ("memory_gb: 1\nmemory_tb_per_second: 3\nhalf_tflops: 1\nfull_tflops: -2\n", "full_tflops (-2) must be 0 or"),
        ("memory_gb: 1\nmemory_tb_per_second: 3\nhalf_tflops: 1\nfull_matmul_tflops: 2\n", "at most full_tflops (0.0)"),
        ("memory_gb: .inf\nmemory_tb_per_second: 3\nhalf_tflops: 1\n", "'memory_gb' in {file} (inf) must be a number"),
        ("memory_gb: 1\nmemory_tb_per_second: 3\nhalf_tflops: 1\nfamily: 9\n", "'family' in {file} (9) must be text"),
        (
            "memory_gb: 1\nmemory_tb_per_second: 3\nhalf_tflops: 1\naliases: me\n",
            "'aliases' in {file} ('me') must be a",
        ),
        (
            "memory_gb: 1\nmemory_tb_per_second: 3\nhalf_tflops: 1\naliases: [1]\n",
            "'aliases' in {file} ([1]) must be a",
        ),
        ("memory_gb: 1\nmemory_tb_per_second: 3\nhalf_tflops: 1\ngpus_per_node: 7.5\n", "must be a whole number"),
        # A number of things is none of parts, even of 0 parts.
        ("memory_gb: 1\nmemory_tb_per_second: 3\nhalf_tflops: 1\ngpus_per_node: 8.0\n", "must be a whole number"),
        (f"memory_gb: 1{400 * '0'}\nmemory_tb_per_second: 3\nhalf_tflops: 1\n", "must be a number below 1e+12"),
        (
            "memory_gb: 192\nmemory_tb_per_second: 5.3\nhalf_tflops: 1307\nmemory_gb: 80\n",
            "{file} is no YAML: memory_gb is named twice; leave one of them out",
        ),
        ("- 1\n", "table of fields"),
        ("a: [\n", "no YAML"),
    ],
)
def test_what_is_wrong_with_a_file_is_reported(tmp_path: Path, text: str, shown: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        gpu_of(str(file))
    assert shown.format(file=file) in str(caught.value)


def test_a_file_that_is_not_there_is_reported() -> None:
    with pytest.raises(ValueError, match=r"none\.yaml cannot be read"):
        gpu_of("none.yaml")
