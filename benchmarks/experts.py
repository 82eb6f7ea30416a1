"""Mixture of experts on CPU: the parts of a layer, and training steps against Hugging Face and megatron-core.

Three tables. Grouped experts against one after another, in one process; tokens sent by all-to-all or by all-gather, on
two and four; and training steps of a Mixtral-like model, 8 layers, hidden 256, 8 heads, sequence 256, vocabulary 8192,
4 experts of 688 features (SwiGLU), top-2, global batch 8 in microbatches of 2, AdamW, gradients clipped to norm 1,
float32, one thread a rank. Each sample of a step is a fresh set of processes: warm-up steps, then timed ones, of which
the median counts; rounds are interleaved and medians shown. CPU seconds are those of all ranks together: on a machine
with few cores, or with other work, they are the steadier number. A row counts only where the loss of every step equals
plain torch's; otherwise its times are not shown, and the exit status is 1.

    python benchmarks/experts.py --rounds 5

megatron-core runs where it is installed; it may have an environment of its own, which needs this package too:

    python -m venv .megatron && .megatron/bin/pip install torch megatron-core -e .
    python benchmarks/experts.py --megatron-python .megatron/bin/python
"""

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from benchmarks.expert_runs import Record, Size

SIZES = {
    "full": {"layers": 8, "hidden": 256, "heads": 8, "ffn": 688, "sequence": 256, "vocabulary": 8192}
    | {"experts": 4, "top_k": 2, "rows": 8, "microbatch_rows": 2, "steps": 8},
    "smoke": {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "sequence": 16, "vocabulary": 64}
    | {"experts": 4, "top_k": 2, "rows": 4, "microbatch_rows": 1, "steps": 4},
}
WARMUP_STEPS = 2
PLAIN = "plain torch"
PEERS = ("Hugging Face", "megatron-core")
AIM = "1.2 times the tokens/s of the better of Hugging Face and megatron-core on as many processes"


class Row(NamedTuple):
    """One row of the table of steps."""

    world: int
    train: "Callable[[Size, Record], None]"


def rows() -> dict[str, Row]:
    """All rows of the table of steps by their names; the yardstick comes first."""
    from benchmarks import expert_runs as runs
    from benchmarks.megatron_run import train_megatron
    from lightning_megatron import PipelineConfig

    def ours(ep: int, **moe: Any) -> "Callable[[Size, Record], None]":
        return partial(runs.train_ours, strategy={"expert_model_parallel_size": ep}, moe=moe)

    overlap = {"expert_model_parallel_size": 2, "pipeline": PipelineConfig(overlap_expert_exchange=True)}

    return {
        PLAIN: Row(1, runs.train_plain),
        "Hugging Face, one": Row(1, partial(runs.train_hugging_face, experts="eager")),
        "Hugging Face, one, grouped": Row(1, partial(runs.train_hugging_face, experts="grouped_mm")),
        "megatron-core, one": Row(1, partial(train_megatron, ep=1)),
        "ours, one": Row(1, ours(1)),
        "ours, one, one by one": Row(1, ours(1, expert_gemm="sequential")),
        "Hugging Face, dp2, grouped": Row(2, partial(runs.train_hugging_face, experts="grouped_mm")),
        "megatron-core, dp2": Row(2, partial(train_megatron, ep=1)),
        "megatron-core, ep2": Row(2, partial(train_megatron, ep=2)),
        "ours, dp2": Row(2, ours(1)),
        "ours, ep2": Row(2, ours(2)),
        "ours, ep2, all-gather": Row(2, ours(2, dispatcher="all_gather")),
        "ours, ep2, forwards beside backwards": Row(2, partial(runs.train_ours, strategy=overlap, moe={})),
    }


# ----------------------------------------------------------------------------------------------------------------------
# On a rank


def run_rank(row: str, size: str) -> dict[str, Any]:
    """Trains on this rank: seconds and loss of each step and the peak of memory, or why the row cannot run."""
    import torch

    from benchmarks.expert_runs import NotHere, Record, Size

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    record = Record()
    try:
        rows()[row].train(Size(**SIZES[size]), record)
    except NotHere as error:
        return {"not_here": str(error)}
    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "cpu_seconds": [after - before for before, after in pairwise(record.cpu_ends)],
        "wall_seconds": [after - before for before, after in pairwise(record.wall_ends)],
        "losses": [loss.item() for loss in record.losses],
        "expert_rows": record.expert_rows,
        "peak_mb": next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024,
        "torch": torch.__version__,
    }


def run_layers(size: str, rounds: int) -> list[dict[str, Any]]:
    """Times the parts of a layer on this rank."""
    import torch

    from benchmarks.expert_layers import time_layers
    from benchmarks.joined import joined_by_gloo

    torch.set_num_threads(1)
    shape = SIZES[size]
    tokens = shape["microbatch_rows"] * shape["sequence"]
    return joined_by_gloo(time_layers)(shape["hidden"], tokens, rounds, repeats=4)


# ----------------------------------------------------------------------------------------------------------------------
# Figures and tables


def sample_of(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """One sample from the records of all ranks: the median of the timed steps; a step's loss is the mean over ranks,
    whose tokens are as many. `busiest` is how many rows the busiest rank's experts had, call by call, to the mean."""
    if "not_here" in figures[0]:
        return figures[0]
    cpu, wall = ([rank[name][WARMUP_STEPS - 1 :] for rank in figures] for name in ("cpu_seconds", "wall_seconds"))
    calls = list(zip(*(rank["expert_rows"] for rank in figures), strict=True))
    return {
        "busiest": sum(map(max, calls)) / sum(map(statistics.mean, calls)) if calls else None,
        "cpu_seconds": statistics.median(sum(step) for step in zip(*cpu, strict=True)),
        "wall_seconds": statistics.median(max(step) for step in zip(*wall, strict=True)),
        "losses": [statistics.mean(losses) for losses in zip(*(rank["losses"] for rank in figures), strict=True)],
        "peak_mb": max(rank["peak_mb"] for rank in figures),
        "torch": figures[0]["torch"],
    }


Samples = dict[str, list[dict[str, Any]]]


def ratio_to_peers(samples: Samples, worlds: dict[str, int], row: str, figure: str) -> float | None:
    """The seconds of the fastest peer on as many processes over those of the row, as the median over rounds; none
    where no peer ran."""
    peers = [
        other
        for other in samples
        if other.startswith(PEERS) and worlds[other] == worlds[row] and all(figure in s for s in samples[other])
    ]
    if not peers:
        return None
    ratios = [min(samples[peer][i][figure] for peer in peers) / own[figure] for i, own in enumerate(samples[row])]
    return float(statistics.median(ratios))


def report_steps(samples: Samples, worlds: dict[str, int], tokens: int) -> tuple[str, bool]:
    """The table of steps, and whether all that ran was right; `tokens` are those of a step."""
    from benchmarks.yardstick import fault_of

    lines = [
        "| row | processes | tokens/s | to the better peer | CPU s/step, all ranks | the better peer's to it "
        "| wall s/step | peak MB, largest rank | busiest experts, rows to the mean | first and last loss |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    is_right = True
    for row, taken in samples.items():
        faults = [
            fault for own, other in zip(taken, samples[PLAIN], strict=True) if (fault := fault_of(own, other, PLAIN))
        ]
        if faults:
            is_right &= all("not_here" in sample for sample in taken)
            lines.append(f"| {row} | {worlds[row]} | {faults[0]} |" + "  |" * 7)
            continue
        cpu, wall, peak = (
            statistics.median(sample[figure] for sample in taken)
            for figure in ("cpu_seconds", "wall_seconds", "peak_mb")
        )
        ratios = (ratio_to_peers(samples, worlds, row, figure) for figure in ("wall_seconds", "cpu_seconds"))
        by_wall, by_cpu = ("" if ratio is None else f"{ratio:.3f}" for ratio in ratios)
        losses, version = taken[0]["losses"], taken[0]["torch"]
        busiest = "" if taken[0]["busiest"] is None else f"{taken[0]['busiest']:.2f}"
        name = row if version == samples[PLAIN][0]["torch"] else f"{row} (torch {version})"
        lines.append(
            f"| {name} | {worlds[row]} | {tokens / wall:,.0f} | {by_wall} | {cpu:.3f} | {by_cpu} | {wall:.3f} "
            f"| {peak:.0f} | {busiest} | {losses[0]:.5f}, {losses[-1]:.5f} |"
        )
    return "\n".join(lines), is_right


def layer_rows(world: int, figures: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each variant from the records of all ranks, with ratios to the first variant of the same shape, taken
    round by round."""
    found: list[dict[str, Any]] = []
    for ranks in zip(*figures, strict=True):
        cpu = [sum(seconds) for seconds in zip(*(rank["cpu_seconds"] for rank in ranks), strict=True)]
        wall = [max(seconds) for seconds in zip(*(rank["wall_seconds"] for rank in ranks), strict=True)]
        row = {"world": world, "shape": ranks[0]["shape"], "variant": ranks[0]["variant"], "cpu": cpu, "wall": wall}
        first = next((other for other in found if other["shape"] == row["shape"]), row)
        for name in ("cpu", "wall"):
            pairs = zip(row[name], first[name], strict=True)
            row[f"{name}_ratio"] = statistics.median(own / other for own, other in pairs)
        found.append(row)
    return found


def report_layers(found: list[dict[str, Any]]) -> str:
    """The table of the parts of a layer."""
    lines = [
        "| processes | layer | variant | CPU ms, all ranks | to the first | wall ms | to the first |",
        "|---:|---|---|---:|---:|---:|---:|",
    ]
    for row in found:
        cpu, wall = (1e3 * statistics.median(row[name]) for name in ("cpu", "wall"))
        lines.append(
            f"| {row['world']} | {row['shape']} | {row['variant']} | {cpu:.2f} | {row['cpu_ratio']:.3f} | {wall:.2f} "
            f"| {row['wall_ratio']:.3f} |"
        )
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------------
# In the process that starts the others


def take(row: str, world: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One sample of a row."""
    from benchmarks.ranks import RankFailed, RanksTooSlow, run_ranks
    from benchmarks.yardstick import failed_sample

    python = arguments.megatron_python if row.startswith("megatron-core") else sys.executable
    command = [__file__, "--run-rank", row, "--size", arguments.size]
    try:
        return sample_of(run_ranks(command, world, python=python, timeout_seconds=arguments.row_seconds))
    except (RankFailed, RanksTooSlow) as error:
        return failed_sample(row, error, PLAIN)


def compare_layers(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the parts of a layer, on each number of processes."""
    from benchmarks.ranks import run_ranks

    command = [__file__, "--layers", "--size", arguments.size, "--rounds", str(3 * arguments.rounds)]
    return [
        row
        for world in arguments.worlds
        for row in layer_rows(world, run_ranks(command, world, timeout_seconds=arguments.row_seconds))
    ]


def compare_steps(arguments: argparse.Namespace) -> Samples:
    """All samples of full steps."""
    every = rows()
    chosen = [row for row in every if row == PLAIN or row in arguments.rows]
    samples: Samples = {row: [] for row in chosen}
    for round_number in range(arguments.rounds):
        for row in chosen:
            samples[row].append(take(row, every[row].world, arguments))
            print(f"round {round_number + 1}: {row}: {samples[row][-1]}", file=sys.stderr, flush=True)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(rows())
    parser.add_argument("--rounds", type=int, default=5, help="how often each row runs, interleaved")
    parser.add_argument("--rows", nargs="*", default=names, choices=names, help=f"of the steps; {PLAIN} always runs")
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 2, 4], choices=[1, 2, 4], help="of the layers")
    parser.add_argument("--size", default="full", choices=list(SIZES))
    parser.add_argument("--megatron-python", default=sys.executable, help="an interpreter that has megatron-core")
    parser.add_argument("--row-seconds", type=float, default=600.0, help="after this long a sample is given up")
    parser.add_argument("--json", type=Path, help="where to save every sample")
    parser.add_argument("--run-rank", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--layers", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds ({arguments.rounds}) must be at least 1")
    if arguments.run_rank:
        print(json.dumps(run_rank(arguments.run_rank, arguments.size)))
    elif arguments.layers:
        print(json.dumps(run_layers(arguments.size, arguments.rounds)))
    else:
        sys.exit(0 if compare(arguments) else 1)


def compare(arguments: argparse.Namespace) -> bool:
    """Runs everything, prints the tables, saves the samples; whether all that ran was right."""
    from benchmarks.machine import as_line, machine, version_of

    facts = machine()
    if version := version_of("megatron-core", arguments.megatron_python):
        facts["megatron-core"] = version
    size = SIZES[arguments.size]
    print(f"{as_line(facts)}\n{arguments.size} size: {size}; {arguments.rounds} rounds, medians\naim: {AIM}")
    layers = compare_layers(arguments)
    if layers:
        print(f"\n{report_layers(layers)}\n", flush=True)
    samples = compare_steps(arguments)
    worlds = {name: row.world for name, row in rows().items()}
    table, is_right = report_steps(samples, worlds, size["rows"] * size["sequence"])
    print(table)
    if arguments.json:
        record = {"machine": facts, "size": size, "layers": layers, "steps": samples}
        arguments.json.write_text(json.dumps(record, indent=1))
    return is_right


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
