"""Compares the loss curves of a run and of one that was resumed from it, and fails where they differ.

python recipes/compare_curves.py first/metrics.csv resumed/metrics.csv

The files are those of Lightning's CSVLogger, with `train_loss` logged at every step; the first run went on past the
checkpoint, so that there are steps that both did.
"""

import csv
import sys

# Two layouts add up in different orders; in float32 the difference is about 1e-6 of a loss at first, and grows slowly.
TOLERANCE = 1e-2


def curve(path: str) -> dict[int, float]:
    """The training loss after each number of optimizer steps."""
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("train_loss")]
    return {int(row["step"]) + 1: float(row["train_loss"]) for row in rows}


def main(first_path: str, resumed_path: str) -> str:
    """Prints the table; returns what is wrong, and nothing where the curves agree."""
    first, resumed = curve(first_path), curve(resumed_path)
    both = sorted(first.keys() & resumed.keys())
    if not both:
        return "the runs have no step in common"
    seam = both[0] - 1
    shown = sorted(step for step in first.keys() | resumed.keys() if seam - 3 <= step <= both[-1] + 3)
    print(f"{'step':>6} {'first run':>11} {'resumed':>11} {'difference':>11}")
    for step in shown:
        if step == seam + 1:
            print(f"{'-- the checkpoint of step ' + str(seam) + ' --':^42}")
        one, other = first.get(step), resumed.get(step)
        difference = f"{other - one:11.1e}" if one is not None and other is not None else ""
        print(f"{step:>6} {cell(one)} {cell(other)} {difference}")
    largest = max(abs(first[step] - resumed[step]) for step in both)
    start = first[min(first)]
    last = sorted(resumed)[-10:]
    end = sum(resumed[step] for step in last) / len(last)
    print(f"\nOn the {len(both)} steps that both runs did, the losses differ by {largest:.1e} at most.")
    print(f"The loss fell from {start:.2f} at step {min(first)} to {end:.2f} over steps {last[0]} to {last[-1]}.")
    if largest > TOLERANCE:
        return f"the resumed run left the first one by {largest:.1e}, more than {TOLERANCE}"
    return "" if end < start else "the loss did not fall"


def cell(loss: float | None) -> str:
    return f"{'':11}" if loss is None else f"{loss:11.6f}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) or 0)
