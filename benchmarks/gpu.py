"""Speed of training a GPT on one GPU: this package in bf16 and FP8, plain torch, compiled, and Hugging Face's models.

Needs this package, torch and lightning; rows that need more, such as transformers, Liger, megatron-core or
FlashAttention-3, say so where it is absent. megatron-core's layers are those without Transformer Engine and Apex.
A Llama of 1.3 billion parameters, one with the width of the 8 billion Llama 3, and layers of eight experts, two a
token, with the sizes of Mixtral 8x7B; as many layers as fit by the formula of `benchmarks/shapes.py`, the same number
for all rows; sequences of 4096 and 8192. Ours runs under the Trainer. Each row is a fresh process: warm-up steps, then
timed ones, of which the median counts. A row that runs out of memory or of time says so. One whose loss strays from
that of the first row shows no time, and the exit status is 1; with eight documents packed into a row, and with dropout,
losses are others, and must be numbers. In the row that saves, the state is copied to host memory after the warm-up and
written to the disk while the timed steps run; a line below the tables says how long training waited for the copy.

TFLOP/s are model FLOPs by formula: matrix products of forward and backward, of experts those chosen, causal attention
counted half, and within a document, without recomputation. MFU is their share of the data sheet's dense peak at the
row's precision; in the next column attention counts in full, as in PaLM (arXiv 2204.02311, appendix B). The share "of
matmul" is of the fastest product of the model's own shapes, or of a square one, as measured in the same run.

    python benchmarks/gpu.py --json gpu.json
    python benchmarks/gpu.py --device cpu --size smoke
"""

import argparse
import json
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from benchmarks.device_runs import Plan, Recorder

    Row = Callable[[Plan, Recorder], None]

OURS, COMPILED, EAGER = "ours, bf16", "plain torch, compiled", "plain torch, eager"
PACKED, DROPPING = "ours, bf16, packed rows", "ours, bf16, dropout"
SAVING, MEGATRON = "ours, bf16, saving", "megatron-core, its own layers"
# Rows that train something else: their losses are those of no other row.
OF_OWN_LOSS = (PACKED, DROPPING)
AIMS = "55% MFU in bf16, with experts 400 TFLOP/s; 1.4 times the tokens/s of bf16 in FP8"
# Relative tolerances of the loss: bf16 rounds each implementation's products its own way, and FP8 rounds them more.
TOLERANCE, FP8_TOLERANCE = 5e-3, 3e-2
# Names of the precisions in the table of peaks.
PRECISIONS = {"bf16": "bf16-mixed", "fp8": "transformer-engine"}


def rows() -> dict[str, "Row"]:
    """Functions that train each row, by its name."""
    from benchmarks import device_runs as runs
    from benchmarks.megatron_run import train_megatron_on_device

    return {
        COMPILED: partial(runs.train_plain, is_compiled=True),
        EAGER: partial(runs.train_plain, is_compiled=False),
        "Hugging Face": runs.train_hugging_face,
        "Hugging Face, Liger": partial(runs.train_hugging_face, with_liger=True),
        MEGATRON: train_megatron_on_device,
        OURS: runs.train_ours,
        "ours, bf16, compiled layers": partial(runs.train_ours, strategy=runs.compiled_strategy),
        "ours, bf16, cuDNN attention": partial(
            runs.train_ours, strategy=partial(runs.attention_strategy, library="cudnn")
        ),
        "ours, bf16, FlashAttention-3": partial(
            runs.train_ours, strategy=partial(runs.attention_strategy, library="flash3")
        ),
        "ours, bf16, recompute": partial(runs.train_ours, strategy=runs.recompute_strategy),
        SAVING: runs.train_saving,
        PACKED: runs.train_packed,
        DROPPING: runs.train_dropping,
        "ours, bf16, Transformer Engine": partial(
            runs.train_ours, strategy=partial(runs.engine_strategy, scaling="none")
        ),
        "ours, fp8": partial(runs.train_ours, strategy=runs.fp8_strategy),
        "ours, Transformer Engine, fp8": partial(
            runs.train_ours, strategy=partial(runs.engine_strategy, scaling="current")
        ),
    }


def is_fp8(row: str) -> bool:
    return row.endswith("fp8")


# ----------------------------------------------------------------------------------------------------------------------
# In a process of its own


def look_at(device_type: str, sizes: list[str]) -> dict[str, Any]:
    """Name, software, free memory and matmul speed of the device, shape by shape."""
    import torch

    from benchmarks.machine import machine

    if device_type == "cuda":
        name, free_bytes = torch.cuda.get_device_name(0), torch.cuda.mem_get_info(0)[0]
    else:
        name, free_bytes = "CPU", os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    matmul = {size: multiply(size, torch.device(device_type)) for size in sizes}
    return {"name": name, "free_bytes": free_bytes, "machine": machine(), "matmul": matmul}


def multiply(size: str, device: "torch.device") -> dict[str, Any]:
    """FLOP/s of the shape's products and of a square one, in bf16 and, where the device has it, in FP8."""
    import torch

    from benchmarks import matmul
    from benchmarks.shapes import SHAPES

    torch.manual_seed(0)
    shape = SHAPES[size]
    square = [(matmul.SQUARE,) * 3] if device.type == "cuda" else []
    products = [*square, *shape.products(shape.microbatch_tokens)]
    found: dict[str, Any] = {}
    for precision in ("bf16", "fp8") if matmul.has_fp8(device) else ("bf16",):
        rates = {p: matmul.rate(*p, fp8=precision == "fp8", device=device) for p in products}
        best = max(rates, key=lambda p: rates[p])
        by_product = {"x".join(map(str, p)): rate for p, rate in rates.items()}
        found[precision] = {"product": "x".join(map(str, best)), "flops_per_second": rates[best], "all": by_product}
    return found


def run_row(row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains one row: its seconds, losses and memory, or why it could not."""
    import torch

    from benchmarks.device_runs import NotHere, Plan, Recorder
    from benchmarks.matmul import has_fp8
    from benchmarks.shapes import SHAPES

    warnings.simplefilter("ignore")
    shape, sequence, device = SHAPES[arguments.size[0]], arguments.sequence[0], torch.device(arguments.device)
    plan = Plan(
        config=shape.config(arguments.layers, sequence),
        sequence=sequence,
        microbatch_rows=shape.microbatch_rows(sequence),
        microbatches=arguments.microbatches,
        warmup_steps=arguments.warmup,
        timed_steps=arguments.steps,
        device=device,
    )
    recorder = Recorder(plan)
    try:
        if is_fp8(row) and device.type == "cuda" and not has_fp8(device):
            raise NotHere("this device has no FP8 units")
        rows()[row](plan, recorder)
    except NotHere as error:
        return {"not_here": str(error)}
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": f"out of memory: {str(error).splitlines()[0]}"}
    return recorder.figures()


# ----------------------------------------------------------------------------------------------------------------------
# In the process that starts the others


def ask(arguments: argparse.Namespace, *command: str) -> Any:
    """Answer of a separate process, or in `failed` why there is none."""
    from benchmarks.ranks import RankFailed, RanksTooSlow, run_ranks

    try:
        [answer] = run_ranks(
            [__file__, "--device", arguments.device, *command], 1, timeout_seconds=arguments.row_seconds
        )
        return answer
    except RanksTooSlow as error:
        return {"out_of_time": str(error)}
    except RankFailed as error:
        print(error, file=sys.stderr)
        return {"failed": f"failed: {str(error).strip().splitlines()[-1]}"}


def fault_of(row: str, found: dict[str, Any], yardstick: dict[str, Any] | None) -> str:
    """Reason why a row shows no figures; empty: none. Its losses must equal the yardstick's, if there is one for them,
    and be numbers."""
    for reason in ("not_here", "out_of_memory", "out_of_time", "failed"):
        if reason in found:
            return str(found[reason])
    wanted = found["losses"] if yardstick is None or row in OF_OWN_LOSS else yardstick["losses"]
    tolerance = FP8_TOLERANCE if is_fp8(row) else TOLERANCE
    for step, (loss, other) in enumerate(zip(found["losses"], wanted, strict=True), start=1):
        # Written so that NaN is an error.
        if not abs(loss - other) <= tolerance * abs(other):
            return f"wrong: the loss of step {step} is {loss:.4f}, that of the first row is {other:.4f}"
    return ""


def is_broken(fault: str) -> bool:
    """Whether an error is more than a missing package or too little memory."""
    return fault.startswith(("failed", "wrong"))


def report(part: dict[str, Any], device_name: str) -> list[str]:
    """The rows of the table of one shape and sequence."""
    from benchmarks.device_runs import DOCUMENTS
    from benchmarks.shapes import SHAPES
    from lightning_megatron.metrics.throughput import Speed, peak_flops
    from lightning_megatron.transformer import cost

    shape, sequence = SHAPES[part["size"]], part["sequence"]
    config, step_rows = shape.config(part["layers"], sequence), part["step_rows"]

    def flops_of(row: str, *, is_causal: bool) -> int:
        documents = DOCUMENTS if row == PACKED else 1
        return cost.training_flops(
            config, batch=step_rows * documents, sequence=sequence // documents, is_causal=is_causal
        )

    def speed_of(found: dict[str, Any], num_flops: float) -> Speed:
        return Speed(step_rows * sequence, num_flops, statistics.median(found["seconds"]), num_devices=1)

    def share(speed: Speed, peak: float) -> str:
        return f"{speed.mfu(peak):.1%}" if peak else "?"

    lines = []
    ours = part["rows"].get(OURS, {})
    for row, found in part["rows"].items():
        head = f"| {part['size']} | {part['layers']} | {sequence} | {row} |"
        if found["fault"]:
            lines.append(f"{head} {found['fault']} |" + "  |" * 7)
            continue
        speed, full_speed = (speed_of(found, flops_of(row, is_causal=is_causal)) for is_causal in (True, False))
        precision = "fp8" if is_fp8(row) else "bf16"
        peak = peak_flops(device_name, PRECISIONS[precision])
        measured = part["matmul"].get(precision, {}).get("flops_per_second", 0.0)
        ratio = ""
        if ours and not ours["fault"]:
            ratio = f"{statistics.median(ours['seconds']) / statistics.median(found['seconds']):.3f}"
        lines.append(
            f"{head} {speed.tokens_per_second:,.0f} | {speed.flops_per_second / 1e12:.4g} | {share(speed, peak)} "
            f"| {share(full_speed, peak)} | {share(speed, measured)} | {found['peak_bytes'] / 2**30:.2f} | {ratio} "
            f"| {found['losses'][-1]:.4f} |"
        )
    return lines


def saves_line(part: dict[str, Any]) -> str:
    """What a save of a part's state costs training; empty: there was none."""
    saves = part["rows"].get(SAVING, {}).get("saves")
    if not saves:
        return ""
    first, second = saves["seconds"]
    size = saves["bytes"] / 1e9
    return (
        f"{part['size']} at {part['sequence']}: training waits {second:.3f} s for a save of {size:.3g} GB "
        f"({size / second:.3g} GB/s), and {first:.3f} s for the first, which makes buffers in host memory"
    )


HEAD = (
    "| shape | layers | sequence | row | tokens/s | TFLOP/s | MFU, causal half | MFU, attention whole | of matmul "
    "| peak GiB | tokens/s to ours bf16 | last loss |\n" + "|---" * 12 + "|"
)


def main() -> None:
    import torch

    from benchmarks.shapes import SHAPES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", nargs="+", default=["1.3b", "8b", "8x7b"], choices=list(SHAPES))
    parser.add_argument("--sequence", type=int, nargs="+", default=[], help="instead of those of the shape")
    parser.add_argument("--rows", nargs="+", default=[], choices=list(rows()))
    parser.add_argument("--no-compile", action="store_true", help="leave out what torch.compile compiles")
    parser.add_argument("--microbatches", type=int, default=4, help="of a step, each of the shape's rows")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones, at least 1")
    parser.add_argument("--steps", type=int, default=5, help="timed steps; their median counts")
    parser.add_argument("--row-seconds", type=float, default=300.0, help="after this long a row is given up")
    parser.add_argument("--json", type=Path, help="where to save all figures; written after every row")
    parser.add_argument("--layers", type=int, default=0, help="instead of as many as fit")
    parser.add_argument("--look", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--run-row", choices=list(rows()), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if min(arguments.warmup, arguments.steps, arguments.microbatches) < 1:
        parser.error("--warmup, --steps and --microbatches must be at least 1")
    if arguments.look:
        print(json.dumps(look_at(arguments.device, arguments.size)))
    elif arguments.run_row:
        print(json.dumps(run_row(arguments.run_row, arguments)))
    else:
        sys.exit(0 if compare(arguments) else 1)


def chosen_rows(arguments: argparse.Namespace) -> list[str]:
    """Rows to run, by default all, in the table's order; plain torch runs eagerly only where nothing is compiled."""
    compiled = [row for row in rows() if "compiled" in row]
    unwanted = compiled if arguments.no_compile else [EAGER]
    return [row for row in rows() if (row in arguments.rows if arguments.rows else row not in unwanted)]


def compare(arguments: argparse.Namespace) -> bool:
    """Runs everything, prints the table as it grows, saves the figures; whether all that ran was right."""
    from benchmarks.machine import as_line
    from benchmarks.shapes import SHAPES
    from lightning_megatron.metrics.throughput import peak_flops

    device = ask(arguments, "--look", "--size", *arguments.size)
    if "name" not in device:
        raise SystemExit(f"the device cannot be looked at: {device}")
    name = device["name"]
    peaks = {kind: peak_flops(name, precision) for kind, precision in PRECISIONS.items()}
    print(f"{as_line(device['machine'])}\naims: {AIMS}")
    print(f"data sheet, dense TFLOP/s: {', '.join(f'{k} {p / 1e12:g}' if p else f'{k} ?' for k, p in peaks.items())}")
    record: dict[str, Any] = {"device": device, "peak_flops": peaks, "parts": []}
    is_right = True
    for size in arguments.size:
        matmul = device["matmul"][size]
        fastest = (f"{k} {m['flops_per_second'] / 1e12:.4g} ({m['product']})" for k, m in matmul.items())
        print(f"\nfastest product, TFLOP/s: {', '.join(fastest)}\n\n{HEAD}", flush=True)
        for sequence in arguments.sequence or SHAPES[size].sequences:
            shape = SHAPES[size]
            layers = arguments.layers or shape.fitting_layers(sequence, device["free_bytes"])
            if layers == 0:
                print(f"| {size} | 0 | {sequence} | not one layer fits |" + "  |" * 8, flush=True)
                continue
            summary = (
                f"{layers} of {shape.layers} layers, {shape.needed_bytes(layers, sequence) / 2**30:.1f} GiB by formula"
            )
            free = f"{device['free_bytes'] / 2**30:.1f} GiB free"
            print(f"{size} at {sequence}: {summary}, {free}", file=sys.stderr, flush=True)
            step_rows = shape.microbatch_rows(sequence) * arguments.microbatches
            part = {"size": size, "sequence": sequence, "layers": layers, "step_rows": step_rows}
            part |= {"needed_bytes": shape.needed_bytes(layers, sequence), "matmul": matmul, "rows": {}}
            record["parts"].append(part)
            for row in chosen_rows(arguments):
                is_right &= add_row(row, part, arguments)
                if arguments.json:
                    arguments.json.write_text(json.dumps(record, indent=1))
            print("\n".join(report(part, name)), flush=True)
    print("\n".join(["", *filter(None, map(saves_line, record["parts"]))]))
    return is_right


def add_row(row: str, part: dict[str, Any], arguments: argparse.Namespace) -> bool:
    """Runs one row of a part and adds its figures; returns whether it is sound."""
    settings = {"size": part["size"], "sequence": part["sequence"], "layers": part["layers"]}
    settings |= {name: getattr(arguments, name) for name in ("microbatches", "warmup", "steps")}
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    found = ask(arguments, "--run-row", row, *options)
    sound = (found for other, found in part["rows"].items() if other not in OF_OWN_LOSS and not found["fault"])
    yardstick = next(sound, None)
    found["fault"] = fault_of(row, found, yardstick)
    part["rows"][row] = found
    print(f"{part['size']}, {part['sequence']}: {row}: {found}", file=sys.stderr, flush=True)
    return not is_broken(found["fault"])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
