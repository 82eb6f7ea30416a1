"""Cost of a data-parallel step: this package's optimizer, torch DDP, FSDP2 and DeepSpeed's ZeRO on CPU ranks.

The same model, rows and AdamW everywhere, float32, gloo, one thread a rank, with the rank's rows of a step in 1 and in
4 microbatches. Each sample is a fresh set of processes: warm-up steps, then timed ones; rounds are interleaved. CPU
seconds are those of one rank, as a mean over ranks. A row counts only where the loss of every step equals torch DDP's;
otherwise its times are not shown, and the exit status is 1.

    python benchmarks/optimizer.py --rounds 5
    python benchmarks/optimizer.py --rounds 5 --stage 3 --size llama

Stage 1 shards states, with and without overlap of communication. Stage 3 shards parameters too:
each layer's are gathered before its forward and before its backward, and freed after each; or they are "kept" from the
first forward of a step to its last backward. Of the size llama all rows run the model of transformers, unchanged.

Peaks are of one more run of each row, the largest of a rank: resident bytes in the timed steps beyond those that were
there after the warm-up without tensors (`peak`).

DeepSpeed runs where it is installed; it may have an environment of its own, which needs torch and deepspeed alone, and
transformers for the size llama:

    python benchmarks/optimizer.py --deepspeed-python .deepspeed/bin/python
"""

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.replicas import Record, Size

    Row = Callable[[Size, int, Record], None]

_STEPS = {"warmup_steps": 2, "timed_steps": 6}
_MODEL = {"layers": 8, "hidden": 256, "heads": 8, "vocabulary": 8192, **_STEPS}
_SMOKE = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 64, "rows": 4}
SIZES: dict[str, dict[str, Any]] = {
    "full": {**_MODEL, "sequence": 256, "rows": 4},
    # A quarter of the tokens: sums over ranks and updates weigh four times as much.
    "short": {**_MODEL, "sequence": 64, "rows": 4},
    # Weights, and what is sent of them, are most of it: 30 million, and 256 tokens of a rank. In its first three steps
    # this package compares copies of weights bit by bit.
    "llama": {"model": "llama", "layers": 8, "hidden": 512, "heads": 8, "sequence": 64, "vocabulary": 4096, "rows": 4}
    | {"warmup_steps": 3, "timed_steps": 3},
    "smoke": {**_SMOKE, "warmup_steps": 1, "timed_steps": 3},
    "llama smoke": {**_SMOKE, "model": "llama", "warmup_steps": 1, "timed_steps": 3},
}
DDP, FSDP2, DEEPSPEED = "torch DDP", "torch FSDP2", "DeepSpeed ZeRO"
KEPT = ", kept"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The best of some rows, which others are held against."""

    rows: tuple[str, ...]
    aim: float
    """Upper bound on the figure of this package over that of the best, which is the project's aim."""
    figure: str = "cpu_seconds"


BARS = {
    1: {
        "CPU to DDP": Bar(rows=(DDP,), aim=1.06),
        "CPU to FSDP2": Bar(rows=(FSDP2,), aim=0.8),
    },
    3: {
        f"{name} to the better{ending}": Bar(rows=(FSDP2 + ending, f"{DEEPSPEED}-3{ending}"), aim=1.0, figure=figure)
        for name, figure in (("CPU", "cpu_seconds"), ("peak", "peak_bytes"))
        for ending in ("", KEPT)
    },
}


def rows(stage: int) -> dict[str, "Row"]:
    """Functions that train each row, by its name; the yardstick comes first."""
    from benchmarks import replicas

    ours: dict[str, dict[str, Any]]
    bucket = replicas.BUCKET_MB * 2**20 // 4
    if stage == 1:
        ours = {
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
        sizes = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
        others = {
            "torch DDP, no overlap": partial(replicas.train_ddp, overlap=False),
            FSDP2: partial(replicas.train_fsdp2, stage=1, keeps=True),
            f"{DEEPSPEED}-1": partial(replicas.train_deepspeed, zero={"stage": 1, "overlap_comm": False}),
            f"{DEEPSPEED}-1, overlap": partial(
                replicas.train_deepspeed, zero={"stage": 1, "overlap_comm": True, **sizes}
            ),
        }
    else:
        # DeepSpeed's own bucket alone has 2 GB, and its sizes, made for larger models, would free nothing of this one.
        zero_3 = {"stage": 3, "reduce_bucket_size": bucket}
        freed = {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
        # The hook by which `fit` counts steps reads no weights.
        own = {"kind": "distributed_parameters", "gather_for_hooks": False}
        ours = {"ours": own, f"ours{KEPT}": {**own, "reshard_after_forward": False}}
        others = {
            FSDP2: partial(replicas.train_fsdp2, stage=3, keeps=False),
            FSDP2 + KEPT: partial(replicas.train_fsdp2, stage=3, keeps=True),
            f"{DEEPSPEED}-3": partial(replicas.train_deepspeed, zero={**zero_3, **freed}),
            f"{DEEPSPEED}-3{KEPT}": partial(replicas.train_deepspeed, zero=zero_3),
        }
    return {
        DDP: partial(replicas.train_ddp, overlap=True),
        **others,
        **{name: partial(replicas.train_ours, optimizer=settings) for name, settings in ours.items()},
    }


def run_rank(row: str, stage: int, size: str, microbatches: int) -> dict[str, Any]:
    """Trains on this rank: its seconds a step, its peak and the loss of each step, or why the row cannot run."""
    import torch

    from benchmarks.clock import StepClock
    from benchmarks.replicas import NotHere, Record, Size

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    shape = Size(**SIZES[size])
    record = Record(clock=StepClock(shape.warmup_steps, shape.timed_steps))
    try:
        rows(stage)[row](shape, microbatches, record)
    except NotHere as error:
        return {"not_here": str(error)}
    return {
        "cpu_seconds": record.clock.cpu_seconds,
        "wall_seconds": record.clock.wall_seconds,
        "peak_bytes": record.peak.num_bytes,
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
        "peak_bytes": max(rank["peak_bytes"] for rank in figures),
        "losses": [statistics.mean(losses) for losses in zip(*(rank["losses"] for rank in figures), strict=True)],
        "torch": figures[0]["torch"],
    }


Samples = dict[str, list[dict[str, Any]]]


def report(samples: Samples, stage: int) -> tuple[str, bool]:
    """The table of one number of ranks and of microbatches, and whether all that ran was right."""
    from benchmarks.yardstick import fault_of

    right = {
        row: taken
        for row, taken in samples.items()
        if not any(fault_of(*pair, DDP) for pair in zip(taken, samples[DDP], strict=True))
    }

    def ratio(row: str, bar: Bar) -> str:
        """The median over rounds of the ratio of figures in the same round."""
        bests = [one for one in bar.rows if one in right]
        if not bests or row.endswith(KEPT) != bests[0].endswith(KEPT):
            return ""
        best = min(bests, key=lambda one: statistics.median(sample[bar.figure] for sample in right[one]))
        pairs = zip(right[row], right[best], strict=True)
        return f"{statistics.median(own[bar.figure] / other[bar.figure] for own, other in pairs):.3f}"

    bars = BARS[stage]
    heads = ["row", "CPU s/step of a rank", *(f"{name} (aim {bar.aim})" for name, bar in bars.items())]
    heads += ["wall s/step", "peak MB", "first and last loss"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    is_right = True
    for row, taken in samples.items():
        if row not in right:
            is_right &= all("not_here" in sample for sample in taken)
            faults = [fault_of(*pair, DDP) for pair in zip(taken, samples[DDP], strict=True)]
            lines.append(f"| {row} | {next(filter(None, faults))} |{'  |' * (len(heads) - 2)}")
            continue
        cpu, wall, peak = (
            statistics.median(sample[figure] for sample in taken)
            for figure in ("cpu_seconds", "wall_seconds", "peak_bytes")
        )
        losses, version = taken[0]["losses"], taken[0]["torch"]
        name = row if version == samples[DDP][0]["torch"] else f"{row} (torch {version})"
        cells = [name, f"{cpu:.3f}", *(ratio(row, bar) for bar in bars.values())]
        cells += [f"{wall:.3f}", f"{peak / 1e6:.0f}", f"{losses[0]:.5f}, {losses[-1]:.5f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines), is_right


def take(row: str, arguments: argparse.Namespace, world: int, microbatches: int) -> dict[str, Any]:
    """One sample of a row: its times of one run, and its peak of another."""
    from benchmarks.peak import ENVIRONMENT
    from benchmarks.ranks import RankFailed, RanksTooSlow, run_ranks
    from benchmarks.yardstick import failed_sample

    command = [__file__, "--run-rank", row, "--stage", str(arguments.stage), "--size", arguments.size]
    command += ["--microbatches", str(microbatches)]
    python = arguments.deepspeed_python if row.startswith("DeepSpeed") else sys.executable
    try:
        timed, measured = (
            sample_of(
                run_ranks(command, world, python=python, timeout_seconds=arguments.row_seconds, environment=environment)
            )
            for environment in ({}, ENVIRONMENT)
        )
    except (RankFailed, RanksTooSlow) as error:
        return failed_sample(row, error, DDP)
    return timed if "not_here" in timed else timed | {"peak_bytes": measured["peak_bytes"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(dict.fromkeys(name for stage in BARS for name in rows(stage)))
    parser.add_argument("--stage", type=int, default=1, choices=list(BARS), help="of ZeRO, what ranks share out")
    parser.add_argument("--rounds", type=int, default=5, help="how often each row runs, interleaved")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="numbers of processes")
    parser.add_argument("--microbatches", type=int, nargs="*", default=[1, 4], choices=[1, 2, 4])
    parser.add_argument("--rows", nargs="*", choices=names, help=f"those of the stage; {DDP} always runs")
    parser.add_argument("--size", default="full", choices=list(SIZES))
    parser.add_argument("--deepspeed-python", default=sys.executable, help="an interpreter that has DeepSpeed")
    parser.add_argument("--row-seconds", type=float, default=600.0, help="after this long a sample is given up")
    parser.add_argument("--json", type=Path, help="where to save every sample")
    parser.add_argument("--run-rank", choices=names, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_rank:
        row, microbatches = arguments.run_rank, arguments.microbatches[0]
        print(json.dumps(run_rank(row, arguments.stage, arguments.size, microbatches)))
        return
    if arguments.rounds < 1:
        parser.error(f"--rounds ({arguments.rounds}) must be at least 1")
    sys.exit(0 if compare(arguments) else 1)


def compare(arguments: argparse.Namespace) -> bool:
    """Runs everything, prints the tables, saves the samples; whether all that ran was right."""
    from benchmarks.machine import as_line, machine

    chosen = [row for row in rows(arguments.stage) if row == DDP or row in (arguments.rows or rows(arguments.stage))]
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
        table, is_right_here = report(taken, arguments.stage)
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
