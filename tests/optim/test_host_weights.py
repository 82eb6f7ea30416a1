"""An optimizer's step in host memory: one device's numbers, and the device's bytes without its states."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_megatron.optim.bucket_layout import bucket_layouts
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.host_weights import offloaded
from lightning_megatron.planner.dry_run import dry_run
from lightning_megatron.planner.hardware import gpu_of
from lightning_megatron.planner.memory import rank_memory
from lightning_megatron.planner.memory_tracker import HOST, OTHERS, MemoryTracker
from lightning_megatron.planner.step_time import step_time
from lightning_megatron.testing import certify
from tests.any_module import networks
from tests.any_module.model_families import Causal, batches
from tests.harness.sample import every_nth
from tests.optim.test_sharded_gradients import Halves, run_of

CASES: list[tuple[Any, Any, str]] = [
    # Its hooks read and change gradients, which are in host memory.
    (Halves, networks.batches, "dp2m2-zero2-offload"),
    (Halves, networks.batches, "pp2-offload"),
    (functools.partial(Causal, "qwen3_moe"), batches, "ep2m2-zero3-offload"),
    (networks.TrainsOverTensor, networks.batches, "dp2tp2-sp-zero-offload"),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("module", "given", "layout"), every_nth(CASES, 4))
def test_numbers_are_those_of_one_device(module: Any, given: Any, layout: str) -> None:
    certify(module, given, layouts=(layout,), steps=3).assert_equal()


@pytest.mark.parametrize(("fraction", "number"), [(1.0, 4), (0.75, 3), (0.7, 3), (0.25, 1), (0.01, 1)])
def test_a_fraction_is_rounded_up_to_complete_buckets(fraction: float, number: int) -> None:
    buckets: Any = [_Bucket(layout) for layout in bucket_layouts([160] * 4, num_shards=2, bucket_size=160)]
    assert list(offloaded(buckets, fraction)) == buckets[:number]


class _Bucket:
    def __init__(self, layout: Any) -> None:
        self.layout = layout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpu_offload": True, "offload_fraction": 0.0}, r"offload_fraction \(0.0\) must be above 0 and at most 1"),
        ({"cpu_offload": True, "offload_fraction": 1.5}, r"offload_fraction \(1.5\) must be above 0 and at most 1"),
        ({"offload_fraction": 0.5}, r"offload_fraction \(0.5\) acts with cpu_offload alone"),
    ],
)
def test_a_fraction_that_makes_no_sense_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings)


@pytest.mark.parametrize("kind", ["distributed", "distributed_parameters"])
def test_a_dry_run_and_the_closed_form_tell_what_the_device_and_what_the_host_holds(kind: Any) -> None:
    on_device = run_of(kind)
    run = replace(on_device, optimizer=replace(on_device.optimizer, cpu_offload=True))
    found, before, dp = dry_run(run, 0), dry_run(on_device, 0), 8
    own = found.parameters / dp
    assert found.peak_by_kind.keys().isdisjoint({"master weights", "moments"})
    # Main weights in float32, what of them is copied in 16 bits, two moments, and gradients.
    assert found.host_bytes == pytest.approx(own * (4 + 2 + 8 + 4), rel=0.01) and before.host_bytes == 0
    # Of sharded parameters the device has the shard in 16 bits.
    shard = 2 * own if kind == "distributed_parameters" else 0
    # Until the optimizer steps the device holds its states as well; what is compared after a step takes some memory.
    saved = before.peak_bytes - found.peak_bytes
    assert saved == pytest.approx(12 * own - shard, rel=0.03)
    closed, closed_before = rank_memory(run, 0), rank_memory(on_device, 0)
    assert closed.host == pytest.approx(found.host_bytes, rel=0.01) and "host" not in closed.by_kind()
    assert closed_before.allocated - closed.allocated == pytest.approx(12 * own - shard, rel=0.02)
    half = replace(on_device, optimizer=replace(run.optimizer, offload_fraction=0.5))
    assert rank_memory(half, 0).host == pytest.approx(closed.host / 2)
    gpu = gpu_of("h100")
    seconds = [step_time(one, gpu, gpu.constants).optimizer for one in (on_device, half, run)]
    # 30 bytes of a step, and 6 that are copied, at the bandwidths of host memory and of PCIe.
    assert seconds[2] == pytest.approx(own * (30 / 20e9 + 6 / 32e9), rel=0.01)
    assert seconds[1] == pytest.approx((seconds[0] + seconds[2]) / 2)


def test_what_the_host_computes_of_its_own_takes_no_memory_of_the_device() -> None:
    with MemoryTracker(torch.device("meta")) as tracker:
        on_host, on_device = (torch.zeros(1000, device="meta") for _ in range(2))
        tracker.leave_out([on_host])
        root, both = on_host.sqrt(), on_host + on_device
    # The device's in blocks of 512 bytes.
    assert tracker.held == {HOST: 2 * 4000, OTHERS: 2 * 4096}
    del root, both
    assert tracker.held == {HOST: 4000, OTHERS: 4096}
