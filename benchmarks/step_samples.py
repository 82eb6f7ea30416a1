"""Samples of training steps: fresh processes a sample, modes interleaved, a table of medians with ratios to one mode.

CPU seconds are summed over ranks: on a machine with few cores they are the steadier number. Peak memory is that of the
largest rank (VmHWM).
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.clock import StepClock

Sample = dict[str, float]
"""CPU seconds, wall seconds and megabytes of a mode."""


def run(
    script: str,
    description: str,
    modes: Mapping[str, int],
    train: Callable[[str], "StepClock"],
    *,
    aims: Mapping[str, tuple[str, float]],
) -> None:
    """The command of a script: runs `modes`, each with so many processes, and prints the table.

    `train` runs a mode on one rank. `aims` has the mode that another is compared with, and the largest ratio; the first
    mode is compared with where there is none.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=5, help="how often each mode runs, interleaved")
    parser.add_argument("--modes", nargs="*", default=list(modes), help="a choice of modes; the first always runs")
    parser.add_argument("--json", type=Path, help="where to save every sample")
    parser.add_argument("--run-rank", choices=list(modes), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_rank:
        _print_figures(train(arguments.run_rank))
        return
    if unknown := sorted(set(arguments.modes) - set(modes)):
        parser.error(f"unknown modes {unknown}; there are {list(modes)}")
    first = next(iter(modes))
    chosen = list(dict.fromkeys([first, *arguments.modes]))
    samples: dict[str, list[Sample]] = {mode: [] for mode in chosen}
    for round_number in range(arguments.rounds):
        for mode in chosen:
            samples[mode].append(sample_of(script, mode, modes[mode]))
            print(f"round {round_number + 1}: {mode}: {samples[mode][-1]}", file=sys.stderr, flush=True)
    print(_report(samples, {mode: aim for mode, aim in aims.items() if aim[0] in samples}))
    if arguments.json:
        arguments.json.write_text(json.dumps(samples, indent=1))


def _print_figures(clock: "StepClock") -> None:
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"cpu_seconds": clock.cpu_seconds, "wall_seconds": clock.wall_seconds, "peak_mb": peak / 1024}))


def sample_of(script: str, mode: str, num_ranks: int) -> Sample:
    """One sample of a mode: CPU seconds a step over all ranks, wall seconds, memory of the largest rank."""
    from benchmarks.ranks import run_ranks

    try:
        figures = run_ranks([script, "--run-rank", mode], num_ranks, timeout_seconds=600)
    except RuntimeError as error:
        raise SystemExit(f"{mode} failed:\n{error}") from None
    return {
        "cpu_seconds": sum(figure["cpu_seconds"] for figure in figures),
        "wall_seconds": max(figure["wall_seconds"] for figure in figures),
        "peak_mb": max(figure["peak_mb"] for figure in figures),
    }


def _report(samples: Mapping[str, list[Sample]], aims: Mapping[str, tuple[str, float]]) -> str:
    """A table of medians."""
    import lightning
    import torch

    first = next(iter(samples))

    def median(mode: str, figure: str) -> float:
        return statistics.median(sample[figure] for sample in samples[mode])

    def ratio(mode: str, base: str) -> float:
        """The median over rounds of the ratio of CPU seconds to those of another mode in the same round."""
        pairs = zip(samples[mode], samples[base], strict=True)
        return statistics.median(own["cpu_seconds"] / other["cpu_seconds"] for own, other in pairs)

    lines = [
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, lightning {lightning.__version__}; "
        f"{len(samples[first])} rounds, medians",
        "",
        "| mode | CPU s/step, all ranks | ratio | to | aim | wall s/step | peak MB, largest rank |",
        "|---|--:|--:|---|--:|--:|--:|",
    ]
    for mode in samples:
        base, aim = aims.get(mode, (first, 0.0))
        lines.append(
            f"| {mode} | {median(mode, 'cpu_seconds'):.3f} | {ratio(mode, base):.3f} | {base} | "
            f"{f'{aim:.2f}' if aim else ''} | {median(mode, 'wall_seconds'):.3f} | {median(mode, 'peak_mb'):.0f} |"
        )
    return "\n".join(lines)
