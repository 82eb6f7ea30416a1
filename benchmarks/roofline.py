"""Where the time of a microbatch goes on one device, beside what the device's own rates allow.

Forward and backward of one microbatch of a shape of `gpu.py`, in bf16 by autocast, are counted (FLOPs of products,
bytes of kernels other than attention; FLOPs of attention by formula), timed, and profiled kernel by kernel:

    products         as long as their FLOPs take at the best measured product of the shape
    attention        as long as its FLOPs take at that rate
    other kernels    as long as their bytes take at the measured speed of a copy
    no kernel        the rest of the time: the device waits for the host

Neighbouring operations that torch.compile makes one kernel move fewer bytes than are counted here, operation by
operation. `--json` takes what is printed and the kernels that take longest.
"""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu, matmul
from benchmarks.device_work import DeviceWork
from benchmarks.machine import as_line, machine
from benchmarks.shapes import SHAPES
from lightning_megatron import KernelConfig
from lightning_megatron.any_module.plan import ModelPlan
from lightning_megatron.models import GPTModel
from lightning_megatron.trainer.setup.compiled_layers import compile_layers
from lightning_megatron.transformer import cost

PARTS = ("products", "attention", "other kernels")
# Of torch's operations on a CPU, and of the names of kernels of cuBLAS, CUTLASS, cuDNN and FlashAttention.
_PRODUCTS = ("mm", "gemm", "cutlass", "nvjet", "xmma", "cublas")
_ATTENTION = ("attention", "flash", "fmha")
_COPIED_BYTES = {"cuda": 2**30, "cpu": 2**26}
_LONGEST = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--compiled", action="store_true", help="compile every layer")
    parser.add_argument("--json", type=Path, help="file to write, too")
    asked = parser.parse_args()
    if asked.layers < 1 or asked.sequence < 1:
        parser.error(f"--layers ({asked.layers}) and --sequence ({asked.sequence}) must be at least 1")
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; use --device cpu with --size smoke")
    found = measure(asked.size, asked.layers, asked.sequence, torch.device(asked.device), is_compiled=asked.compiled)
    print(as_line(machine()))
    print("\n".join(table(found)))
    if asked.json is not None:
        asked.json.write_text(json.dumps({"machine": machine(), **found}, indent=1), encoding="utf-8")


def measure(
    size: str, layers: int, sequence: int, device: torch.device, *, is_compiled: bool = False
) -> dict[str, Any]:
    """Seconds, counts and rates of a microbatch, and its longest kernels."""
    torch.manual_seed(0)
    shape = SHAPES[size]
    with device:
        model = GPTModel(shape.config(layers, sequence)).train()
        tokens = torch.randint(shape.vocabulary, (shape.microbatch_rows(sequence), sequence))

    def microbatch() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = model(tokens, labels=tokens)
        loss.backward()

    microbatch()
    with FlopCounterMode(display=False) as flops:
        microbatch()
    with DeviceWork(device.type) as counted:
        microbatch()
    by_operation = flops.get_flop_counts()["Global"]
    products = sum(one for name, one in by_operation.items() if _part_of(str(name)) != "attention")
    # Not every kernel of attention is counted; causal attention is half of it.
    asked = cost.training_flops(model.config, batch=len(tokens), sequence=sequence, is_causal=True)
    if is_compiled:
        compile_layers(
            KernelConfig(compile_layers=True), nn.ModuleDict({"net": model}), ModelPlan(), {"net": model}, model.mesh
        )
    seconds = matmul.seconds(microbatch, device)
    kernels = _profiled(microbatch, device)
    parts: Counter[str] = Counter()
    for name, one in kernels.items():
        parts[_part_of(name)] += one
    return {
        "size": size,
        "layers": layers,
        "sequence": sequence,
        "is_compiled": is_compiled,
        "seconds": statistics.median(seconds),
        "part_seconds": {part: parts[part] for part in PARTS},
        "flops": {"products": products, "attention": asked - products},
        "bytes": counted.work.num_bytes,
        "flops_per_second": gpu.multiply(size, device)["bf16"]["flops_per_second"],
        "bytes_per_second": _copy_rate(device),
        "longest": dict(kernels.most_common(_LONGEST)),
    }


def table(found: dict[str, Any]) -> list[str]:
    """Rows of a Markdown table: what each part took, and what it would take at the device's rates."""
    wall, parts = found["seconds"], found["part_seconds"]
    bounds = {part: flops / found["flops_per_second"] for part, flops in found["flops"].items()}
    bounds["other kernels"] = found["bytes"] / found["bytes_per_second"]
    asked = {part: f"{flops / 1e12:.3f} TFLOP" for part, flops in found["flops"].items()}
    asked["other kernels"] = f"{found['bytes'] / 1e9:.2f} GB"
    kind = "compiled" if found["is_compiled"] else "not compiled"
    lines = [
        f"{found['size']}, {found['layers']} layers, {found['sequence']} tokens a row, {kind}: {wall * 1e3:.2f} ms; "
        f"products {found['flops_per_second'] / 1e12:.4g} TFLOP/s, copies {found['bytes_per_second'] / 1e9:.4g} GB/s",
        "",
        "| part | asked for | at the device's rates, ms | measured, ms | of the time |",
        "|---|--:|--:|--:|--:|",
    ]
    for part in PARTS:
        row = f"| {part} | {asked[part]} | {bounds[part] * 1e3:.2f} | {parts[part] * 1e3:.2f} "
        lines.append(f"{row}| {parts[part] / wall:.1%} |")
    rest = wall - sum(parts.values())
    return [*lines, f"| no kernel | | | {rest * 1e3:.2f} | {rest / wall:.1%} |"]


def _part_of(name: str) -> str:
    lower = name.lower()
    if any(one in lower for one in _ATTENTION):
        return "attention"
    return "products" if any(one in lower for one in _PRODUCTS) else "other kernels"


def _profiled(microbatch: Callable[[], None], device: torch.device) -> Counter[str]:
    """Seconds of each kernel of a microbatch; of each operation by itself on a CPU."""
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as watched:
        microbatch()
        if is_cuda:
            torch.cuda.synchronize(device)
    found: Counter[str] = Counter()
    for event in watched.key_averages():
        if is_cuda and event.device_type == DeviceType.CUDA:
            found[event.key] += event.self_device_time_total / 1e6
        elif not is_cuda:
            found[event.key] += event.self_cpu_time_total / 1e6
    return found


def _copy_rate(device: torch.device) -> float:
    """Bytes read and written by a copy within the device, a second."""
    source = torch.zeros(_COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = matmul.seconds(lambda: target.copy_(source), device)
    return 2.0 * source.numel() / statistics.median(seconds)


if __name__ == "__main__":
    main()
