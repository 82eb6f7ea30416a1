"""Cost of a checkpoint: this package's saver, torch.save of a gathered state, and torch's DCP, in one interleaved run.

A GPT-shaped state, float32 weights and two moments, each rank holding its share. Seconds that training waits, to
durable (on the disk, flushed), to load it as it was saved, and to load it cut another way; memory above what the
process has with its state. Each sample is a fresh set of processes: a first save, then others, each next to the one
before; the first is listed apart, as its buffers are new. The disk is idle when a save begins. Loads come from
the page cache. A row counts only where every number that was loaded is right; otherwise the exit status is 1.

    python benchmarks/checkpoint.py --megabytes 1000 --ranks 2 --rounds 3
"""

import argparse
import json
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

OURS, OURS_WAITING, GATHERED, DCP, DCP_ASYNC = (
    "ours",
    "ours, waiting",
    "torch.save, gathered",
    "DCP save",
    "DCP async_save",
)
# (row, quantity, yardstick, its quantity, at most this ratio), as the project means it.
AIMS = (
    (OURS, "wait", GATHERED, "wait", 1 / 50),
    (OURS, "wait", DCP_ASYNC, "wait", 1.0),
    (OURS, "durable", DCP, "durable", 1.3),
    (OURS_WAITING, "durable", DCP, "durable", 1.3),
)
COLUMNS = {
    "first_wait": "first wait s",
    "wait": "wait s",
    "first_durable": "first durable s",
    "durable": "durable s",
    "load": "load s",
    "reshard": "load, cut anew s",
}
Samples = dict[str, list[dict[str, Any]]]


def sample_of(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """One sample from the records of all ranks: training goes on when the last rank may."""
    sample: dict[str, Any] = {
        "is_right": all(rank["is_right"] for rank in by_rank),
        "state_megabytes": sum(rank["state_bytes"] for rank in by_rank) / 1e6,
        "peak_megabytes": sum(rank["peak_bytes"] for rank in by_rank) / 1e6,
    }
    for quantity in ("wait", "durable"):
        seconds = [max(at_once) for at_once in zip(*(rank[f"{quantity}_seconds"] for rank in by_rank), strict=True)]
        sample[f"first_{quantity}"] = seconds[0]
        # A single save has no later one.
        sample[quantity] = statistics.median(seconds[1:] or seconds)
    for quantity in ("load", "reshard"):
        if f"{quantity}_seconds" in by_rank[0]:
            sample[quantity] = max(rank[f"{quantity}_seconds"] for rank in by_rank)
    return sample


def ratio(samples: Samples, row: str, quantity: str, yardstick: str, its_quantity: str) -> float:
    """The median over rounds of the ratio within a round."""
    pairs = zip(samples[row], samples[yardstick], strict=True)
    return statistics.median(own[quantity] / other[its_quantity] for own, other in pairs)


def report(samples: Samples) -> tuple[str, bool]:
    """The table with the aims, and whether all that ran was right."""
    lines = [
        f"| {' | '.join(('row', *COLUMNS.values(), 'memory, of the state'))} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    right = {row for row, taken in samples.items() if all(sample["is_right"] for sample in taken)}
    for row, taken in samples.items():
        if row not in right:
            lines.append(f"| {row} | wrong: what was loaded is not what was saved |" + " |" * 6)
            continue

        def cell(quantity: str, taken: list[dict[str, Any]] = taken) -> str:
            found = [sample[quantity] for sample in taken if quantity in sample]
            return f"{statistics.median(found):.3f}" if found else ""

        memory = statistics.median(sample["peak_megabytes"] / sample["state_megabytes"] for sample in taken)
        lines.append(f"| {row} | {' | '.join(map(cell, COLUMNS))} | {memory:.2f} |")
    lines.append("")
    for row, quantity, yardstick, its_quantity, most in AIMS:
        if {row, yardstick} <= right:
            found = ratio(samples, row, quantity, yardstick, its_quantity)
            met = "met" if found <= most else "missed"
            lines.append(f"- {row}, {quantity}: {found:.4f} of {yardstick}'s {its_quantity}; aim {most:.3g}: {met}")
    return "\n".join(lines), len(right) == len(samples)


def take(way: str, arguments: argparse.Namespace, world: int) -> dict[str, Any]:
    """One sample of a row; its checkpoints are removed afterwards."""
    from benchmarks.ranks import run_ranks

    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=arguments.folder) as folder:
        command = [__file__, "--run-rank", way, "--folder", folder]
        command += ["--megabytes", str(arguments.megabytes), "--saves", str(arguments.saves)]
        return sample_of(run_ranks(command, world))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=1000.0, help="of the state of all ranks together")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="numbers of processes")
    parser.add_argument("--rounds", type=int, default=3, help="how often each row runs, interleaved")
    parser.add_argument("--saves", type=int, default=3, help="in each sample, the first listed apart")
    parser.add_argument("--rows", nargs="*", help="which of the rows; all where it is left out")
    parser.add_argument("--folder", type=Path, help="where to save; else the system's folder for such things")
    parser.add_argument("--json", type=Path, help="where to save every sample")
    parser.add_argument("--run-rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    from benchmarks.saves import run_rank, ways

    if arguments.run_rank:
        warnings.simplefilter("ignore")
        print(
            json.dumps(run_rank(arguments.run_rank, int(arguments.megabytes * 1e6), arguments.saves, arguments.folder))
        )
        return
    if min(arguments.rounds, arguments.saves) < 1:
        parser.error(f"--rounds ({arguments.rounds}) and --saves ({arguments.saves}) must be at least 1")
    rows = list(ways()) if arguments.rows is None else arguments.rows
    if strangers := [row for row in rows if row not in ways()]:
        parser.error(f"no rows {strangers}; there are {list(ways())}")
    sys.exit(0 if compare(rows, arguments) else 1)


def compare(rows: list[str], arguments: argparse.Namespace) -> bool:
    """Runs everything, prints the tables, saves the samples; whether all that ran was right."""
    from benchmarks.machine import as_line, machine

    samples: dict[int, Samples] = {world: {row: [] for row in rows} for world in arguments.ranks}
    facts = machine()
    for round_number in range(arguments.rounds):
        for world, taken in samples.items():
            for row in rows:
                taken[row].append(take(row, arguments, world))
                print(f"round {round_number + 1}: {world} ranks: {row}: {taken[row][-1]}", file=sys.stderr)
    print(f"{as_line(facts)}; load at the end {machine()['load']}")
    is_right = True
    for world, taken in samples.items():
        table, is_right_here = report(taken)
        is_right &= is_right_here
        megabytes = next(iter(taken.values()))[0]["state_megabytes"]
        print(f"\n{world} ranks, {megabytes:.0f} MB of state; medians of {arguments.rounds} rounds\n\n{table}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": facts, "samples": samples}, indent=1))
    return is_right


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
