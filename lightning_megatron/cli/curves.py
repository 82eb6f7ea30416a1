"""`lightning-megatron curves`: what runs logged, beside each other as a table and as a picture.

A resumed run is compared with the one that it goes on from, on the steps that both did.
"""

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_megatron.cli.commands import add_command
from lightning_megatron.cli.picture import add_out, out_faults, save_picture
from lightning_megatron.cli.run_logs import read_curves
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.metrics.curve_figure import Curve, curve_figure

# Rows of the table, and steps that it shows around those that all runs did.
_MOST_ROWS, _AROUND = 24, 3
# The end of a curve is the mean over so many values: single batches differ.
_LAST = 10
_WIDTH = 11
_EPILOG = """\
A RUN is a folder with the metrics.csv of Lightning's CSVLogger or the events of its TensorBoardLogger, or such a file;
a folder with folders of runs stands for all of them.

example:  lightning-megatron curves runs/gpt2_124m --out loss.png
          lightning-megatron curves first/metrics.csv resumed/metrics.csv --within 1e-2
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command and its options."""
    parser = add_command(
        commands,
        "curves",
        "Shows the curve of a logged value of runs, as a table and as a picture, and how far further runs are from the "
        "first one on the steps that both did.",
        run=_run,
        epilog=_EPILOG,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run's folder, or the file of its log")
    parser.add_argument("--value", default="train_loss", metavar="NAME", help="the value (default: train_loss)")
    checks = parser.add_argument_group("checks, which end with exit code 1 where they fail")
    checks.add_argument(
        "--within", type=float, metavar="DIFFERENCE", help="further runs differ from the first by so much at most"
    )
    checks.add_argument("--falls", action="store_true", help="the value of each run is lower at its end")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print all values and differences as JSON")
    add_out(output, "the curves")


def _run(options: argparse.Namespace) -> int:
    if faults := out_faults(options.out):
        raise UsageError(faults)
    curves = read_curves(options.runs, options.value)
    differences = _differences(curves)
    if options.json:
        runs = [
            {
                "run": name,
                "values": {step: _number(curve[step]) for step in sorted(curve)},
                "difference": _number(differences.get(name)),
            }
            for name, curve in curves.items()
        ]
        print(json.dumps({"value": options.value, "runs": runs}))
    else:
        _print_table(curves)
        _print_summary(curves, differences, options.value)
    if options.out:
        save_picture(options.out, curve_figure(_short_names(curves), value=options.value, title=options.value))
    return _checked(curves, differences, options)


def _number(value: float | None) -> float | None:
    """The value as JSON has it, which knows neither NaN nor infinity."""
    return value if value is not None and math.isfinite(value) else None


def _differences(curves: Mapping[str, Curve]) -> dict[str, float | None]:
    """The largest difference of each further run from the first; None where they have no step in common."""
    first, *others = curves
    return {name: _largest_difference(curves[first], curves[name]) for name in others}


def _largest_difference(one: Curve, other: Curve) -> float | None:
    apart = [abs(other[step] - one[step]) for step in one.keys() & other.keys()]
    # One that is no number is no small one.
    return math.nan if any(map(math.isnan, apart)) else max(apart, default=None)


def _common(curves: Mapping[str, Curve], *names: str) -> list[int]:
    """Steps that all of these runs did."""
    return sorted(set.intersection(*(set(curves[name]) for name in names)))


def _print_table(curves: Mapping[str, Curve]) -> None:
    """A row for each step: those that all runs did and a few around them, thinned out where they are too many."""
    steps = sorted(set().union(*curves.values()))
    if len(curves) > 1 and (both := _common(curves, *curves)):
        steps = [step for step in steps if both[0] - _AROUND <= step <= both[-1] + _AROUND]
    stride = -(-len(steps) // _MOST_ROWS)
    for number, name in enumerate(curves, 1):
        print(f"run {number}: {name}")
    heads = [f"run {number}" for number in range(1, len(curves) + 1)]
    with_difference = len(curves) == 2
    print(f"\n{'step':>8} " + " ".join(f"{head:>{_WIDTH}}" for head in [*heads, *["difference"] * with_difference]))
    for step in steps[::stride]:
        cells = [f"{curve[step]:{_WIDTH}.6f}" if step in curve else " " * _WIDTH for curve in curves.values()]
        if with_difference and all(step in curve for curve in curves.values()):
            one, other = (curve[step] for curve in curves.values())
            cells.append(f"{other - one:{_WIDTH}.1e}")
        print(f"{step:>8} " + " ".join(cells).rstrip())


def _print_summary(curves: Mapping[str, Curve], differences: Mapping[str, float | None], value: str) -> None:
    print()
    for number, (name, curve) in enumerate(curves.items(), 1):
        start, end, last = _ends(curve)
        steps = f"over steps {last[0]} to {last[-1]}" if len(last) > 1 else f"at step {last[0]}"
        print(f"run {number}: {value} went from {start:.4g} at step {min(curve)} to {end:.4g} {steps}.")
        if name in differences:
            print(f"run {number}: {_from_first(differences[name], len(_common(curves, next(iter(curves)), name)))}")


def _from_first(difference: float | None, num_steps: int) -> str:
    if difference is None:
        return "it has no step in common with run 1."
    return f"on the {num_steps} steps in common with run 1 it differs by {difference:.1e} at most."


def _ends(curve: Curve) -> tuple[float, float, list[int]]:
    """The first value, the mean over the last ones, and the steps of those."""
    last = sorted(curve)[-_LAST:]
    return curve[min(curve)], fmean(curve[step] for step in last), last


def _short_names(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """The curves by the parts of their paths that differ."""
    parts = {name: Path(name).parts for name in curves}
    first = next(iter(parts.values()))
    shared = 0
    while all(len(own) > shared + 1 and own[shared] == first[shared] for own in parts.values()):
        shared += 1
    return {str(Path(*parts[name][shared:])): curve for name, curve in curves.items()}


def _checked(curves: Mapping[str, Curve], differences: Mapping[str, float | None], options: argparse.Namespace) -> int:
    """The exit code of the checks; what is wrong is told at the end."""
    wrong = []
    if options.within is not None:
        for name, difference in differences.items():
            if difference is None:
                wrong.append(f"{name} has no step in common with the first run")
            # A difference that is no number is none within.
            elif not difference <= options.within:
                wrong.append(f"{name} left the first run by {difference:.1e}, more than {options.within}")
    if options.falls:
        for name, curve in curves.items():
            start, end, _ = _ends(curve)
            if not end < start:
                wrong.append(
                    f"{options.value} of {name} did not fall: {start:.4g} at its beginning, {end:.4g} at its end"
                )
    for line in wrong:
        print(line)
    return 1 if wrong else 0
