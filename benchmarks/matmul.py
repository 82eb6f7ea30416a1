"""Measured speed of matrix products on a device: the ceiling of a model's FLOP/s."""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

REPEATS = 10
SQUARE = 8192

Product = Callable[[], Tensor]


def rate(m: int, n: int, k: int, *, fp8: bool, device: torch.device) -> float:
    """FLOP/s of [m, k] times [k, n] on random data, both with k as their contiguous dim; the median of some."""
    multiply = _fp8_product(m, n, k, device) if fp8 else _bf16_product(m, n, k, device)
    return 2.0 * m * n * k / statistics.median(seconds(multiply, device))


def has_fp8(device: torch.device) -> bool:
    """Whether the device has FP8 units: Ada, Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _bf16_product(m: int, n: int, k: int, device: torch.device) -> Product:
    left, right = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
    return lambda: left @ right.t()


def _fp8_product(m: int, n: int, k: int, device: torch.device) -> Product:
    left, right = (torch.randn(rows, k, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn) for rows in (m, n))
    scale = torch.ones((), device=device)
    return lambda: torch._scaled_mm(
        left, right.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def seconds(work: Callable[[], Any], device: torch.device) -> list[float]:
    """Seconds of each of some runs of `work` on a device, after three that are not counted."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        taken = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
        return taken
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]
