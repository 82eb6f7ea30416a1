"""Cost of a data-parallel step: this package's optimizer, torch DDP, FSDP2 and DeepSpeed's ZeRO-1 on CPU ranks.

The same GPT-2 shaped model, rows and AdamW everywhere, float32, gloo, one thread a rank; with and without overlap of
communication, and with the rank's rows of a step in 1 and in 4 microbatches. Each sample is a fresh set of processes:
warm-up steps, then timed ones; rounds are interleaved. CPU seconds are those of one rank, as a mean over ranks. A row
counts only where the loss of every step equals torch DDP's; otherwise its times are not shown, and the exit status
is 1.

    python benchmarks/optimizer.py --rounds 5

DeepSpeed runs where it is installed; it may have an environment of its own, which needs torch and deepspeed alone:

    python benchmarks/optimizer.py --deepspeed-python .deepspeed/bin/python
"""

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.replicas import Record, Size

    Row = Callable[[Size, int, Record], None]

_MODEL = {"layers": 8, "hidden": 256, "heads": 8, "vocabulary": 8192, "warmup_steps": 2, "timed_steps": 6}
SIZES = {
    "full": {**_MODEL, "sequence": 256, "rows": 4},
    # A quarter of the tokens: sums over ranks and updates weigh four times as much.
    "short": {**_MODEL, "sequence": 64, "rows": 4},
    "smoke": {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 64, "rows": 4}
    | {"warmup_steps": 1, "timed_steps": 3},
}
DDP, FSDP2 = "torch DDP", "torch FSDP2"
# Upper bounds on CPU seconds over those of another row, which are the project's aims.
AIMS = {DDP: 1.06, FSDP2: 0.8}


def rows() -> dict[str, "Row"]:
    """Functions that train each row, by its name; the yardstick comes first."""
    from benchmarks import replicas

    ours: dict[str, dict[str, Any]] = {
        # The strategy as it comes: replicated, gradients summed when the backward has ended.
        "ours": {},
        "ours, overlap": {"overlap_grad_reduce": True},
        "ours, distributed": {"kind": "distributed"},
        "ours, distributed, overlap": {
            "kind": "distributed",
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    }
    return {
        DDP: partial(replicas.train_ddp, overlap=True),
        "torch DDP, no overlap": partial(replicas.train_ddp, overlap=False),
        FSDP2: replicas.train_fsdp2,
        "DeepSpeed ZeRO-1": partial(replicas.train_deepspeed, overlap=False),
        "DeepSpeed ZeRO-1, overlap": partial(replicas.train_deepspeed, overlap=True),
        **{name: partial(replicas.train_ours, optimizer=settings) for name, settings in ours.items()},
    }


def run_rank(row: str, size: str, microbatches: int) -> dict[str, Any]:
    """Trains on this rank: its seconds a step and the loss of each step, or why the row cannot run."""
    import torch

    from benchmarks.clock import StepClock
    from benchmarks.replicas import NotHere, Record, Size

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    shape = Size(**SIZES[size])
    record = Record(clock=StepClock(shape.warmup_steps, shape.timed_steps))
    try:
        rows()[row](shape, microbatches, record)
    except NotHere as error:
        return {"not_here": str(error)}
    return {
        "cpu_seconds": record.clock.cpu_seconds,
        "wall_seconds": record.clock.wall_seconds,
        "losses": [loss.item() for loss in record.losses],
        "torch": torch.__version__,
    }


def sample_of(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """One sample from the records of all ranks; the loss of a step is the mean over ranks, whose rows are as many."""
    if "not_here" in figures[0]:
        return figures[0]
    return {
        "cpu_seconds": statistics.mean(rank["cpu_seconds"] for rank in figures),
        "cpu_seconds_by_rank": [rank["cpu_seconds"] for rank in figures],
        "wall_seconds": max(rank["wall_seconds"] for rank in figures),
        "losses": [statistics.mean(losses) for losses in zip(*(rank["losses"] for rank in figures), strict=True)],
        "torch": figures[0]["torch"],
    }


Samples = dict[str, list[dict[str, Any]]]


def report(samples: Samples) -> tuple[str, bool]:
    """The table of one number of ranks and of microbatches, and whether all that ran was right."""
    from benchmarks.yardstick import fault_of

    def ratio(row: str, to: str) -> str:
        """The median over rounds of the ratio of CPU seconds in the same round."""
        if to not in samples or any(fault_of(*pair, DDP) for pair in zip(samples[to], samples[DDP], strict=True)):
            return ""
        pairs = zip(samples[row], samples[to], strict=True)
        return f"{statistics.median(own['cpu_seconds'] / other['cpu_seconds'] for own, other in pairs):.3f}"

    lines = [
        f"| row | CPU s/step of a rank | to DDP (aim {AIMS[DDP]}) | to FSDP2 (aim {AIMS[FSDP2]}) | wall s/step "
        "| first and last loss |",
        "|---|---|---|---|---|---|",
    ]
    is_right = True
    for row, taken in samples.items():
        pairs = zip(taken, samples[DDP], strict=True)
        faults = [fault for own, other in pairs if (fault := fault_of(own, other, DDP))]
        if faults:
            is_right &= all("not_here" in sample for sample in taken)
            lines.append(f"| {row} | {faults[0]} |  |  |  |  |")
            continue
        cpu, wall = (
            statistics.median(sample[figure] for sample in taken) for figure in ("cpu_seconds", "wall_seconds")
        )
        losses, version = taken[0]["losses"], taken[0]["torch"]
        name = row if version == samples[DDP][0]["torch"] else f"{row} (torch {version})"
        lines.append(
            f"| {name} | {cpu:.3f} | {ratio(row, DDP)} | {ratio(row, FSDP2)} | {wall:.3f} "
            f"| {losses[0]:.5f}, {losses[-1]:.5f} |"
        )
    return "\n".join(lines), is_right


def take(row: str, arguments: argparse.Namespace, world: int, microbatches: int) -> dict[str, Any]:
    """One sample of a row."""
    from benchmarks.ranks import RankFailed, RanksTooSlow, run_ranks
    from benchmarks.yardstick import failed_sample

    command = [__file__, "--run-rank", row, "--size", arguments.size, "--microbatches", str(microbatches)]
    python = arguments.deepspeed_python if row.startswith("DeepSpeed") else sys.executable
    try:
        return sample_of(run_ranks(command, world, python=python, timeout_seconds=arguments.row_seconds))
    except (RankFailed, RanksTooSlow) as error:
        return failed_sample(row, error, DDP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(rows())
    parser.add_argument("--rounds", type=int, default=5, help="how often each row runs, interleaved")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="numbers of processes")
    parser.add_argument("--microbatches", type=int, nargs="*", default=[1, 4], choices=[1, 2, 4])
    parser.add_argument("--rows", nargs="*", default=names, choices=names, help=f"{DDP} always runs")
    parser.add_argument("--size", default="full", choices=list(SIZES))
    parser.add_argument("--deepspeed-python", default=sys.executable, help="an interpreter that has DeepSpeed")
    parser.add_argument("--row-seconds", type=float, default=600.0, help="after this long a sample is given up")
    parser.add_argument("--json", type=Path, help="where to save every sample")
    parser.add_argument("--run-rank", choices=names, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_rank:
        print(json.dumps(run_rank(arguments.run_rank, arguments.size, arguments.microbatches[0])))
        return
    if arguments.rounds < 1:
        parser.error(f"--rounds ({arguments.rounds}) must be at least 1")
    sys.exit(0 if compare(arguments) else 1)


def compare(arguments: argparse.Namespace) -> bool:
    """Runs everything, prints the tables, saves the samples; whether all that ran was right."""
    from benchmarks.machine import as_line, machine

    chosen = list(dict.fromkeys([DDP, *arguments.rows]))
    settings = [(world, microbatches) for world in arguments.ranks for microbatches in arguments.microbatches]
    samples: dict[tuple[int, int], Samples] = {setting: {row: [] for row in chosen} for setting in settings}
    facts = machine()
    for round_number in range(arguments.rounds):
        for setting in settings:
            for row in chosen:
                samples[setting][row].append(take(row, arguments, *setting))
                print(f"round {round_number + 1}: {setting}: {row}: {samples[setting][row][-1]}", file=sys.stderr)
    print(f"{as_line(facts)}\n{arguments.size} size: {SIZES[arguments.size]}; {arguments.rounds} rounds, medians")
    is_right = True
    for (world, microbatches), taken in samples.items():
        table, is_right_here = report(taken)
        is_right &= is_right_here
        print(f"\n{world} ranks, {microbatches} microbatches\n\n{table}")
    if arguments.json:
        records = [
            {"ranks": world, "microbatches": microbatches, "samples": taken}
            for (world, microbatches), taken in samples.items()
        ]
        written = {"machine": facts, "size": SIZES[arguments.size], "settings": records}
        arguments.json.write_text(json.dumps(written, indent=1))
    return is_right


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
