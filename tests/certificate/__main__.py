"""Prints the certificate as a table: how far each layout is from one device, for every model and precision.

    python -m tests.certificate                                   # the table; progress goes to stderr
    python -m tests.certificate --write docs/certificate.md       # and the page of the documentation
    python -m tests.certificate --layouts tp2 pp2                 # some rows only

A cell is the largest deviation over losses, gradients, gradient norms, weights and logged values, over all steps and
ranks. Exits with 1 where a cell is not within the tolerance of its precision.
"""

import argparse
import contextlib
import io
import platform
import sys
import time
from pathlib import Path

import lightning
import torch

from tests.certificate.cases import BATCH, LAYOUTS, NUM_STEPS, SEQUENCE, TOLERANCE, Layout
from tests.certificate.compare import CELLS, deviations

COLUMNS = [f"{variant}, {precision}" for variant, precision in CELLS]


def row_of(layout: str) -> tuple[list[str], list[str]]:
    """The cells of a layout, and what is wrong with them, one line each."""
    cells, faults = [], []
    for variant, precision in CELLS:
        try:
            # What the ranks print is Lightning's banner, once for every fit.
            with contextlib.redirect_stdout(io.StringIO()):
                found = deviations(layout, variant, precision)
        except Exception as error:
            # One failure must not hide the other cells.
            cells.append("failed")
            faults.append(f"{layout}, {variant}, {precision}: {error}")
            continue
        largest = max(found.values())
        cells.append(f"{largest:.0e}")
        if not largest < TOLERANCE[precision]:
            cells[-1] = f"**{cells[-1]}**"
            faults.append(f"{layout}, {variant}, {precision}: {found}, the tolerance is {TOLERANCE[precision]:g}")
    return cells, faults


def described(layout: Layout) -> str:
    """The layout as processes and the settings that are not their defaults."""
    settings = [
        (layout.tp > 1, f"tp {layout.tp}"),
        (layout.sp, "sp"),
        (layout.pp > 1, f"pp {layout.pp}"),
        (layout.vp > 1, f"vp {layout.vp}"),
        (layout.schedule != "auto", f"schedule {layout.schedule}"),
        (layout.dp > 1, f"dp {layout.dp}"),
        (layout.microbatches > 1, f"{layout.microbatches} microbatches"),
        (layout.collective, "collective mode"),
        (layout.accumulate > 1, f"accumulate {layout.accumulate}"),
        (layout.clip is not None, f"clip {layout.clip}"),
        (layout.distributed, "distributed optimizer"),
        (layout.overlap, "overlap"),
        (layout.rule == "adamw", "AdamW"),
        (layout.recompute.granularity == "full", "recomputation of layers"),
        (layout.recompute.granularity == "selective", f"recomputation of {', '.join(layout.recompute.parts)}"),
    ]
    return ", ".join([f"{layout.world} rank{'s'[: layout.world > 1]}", *(text for holds, text in settings if holds)])


def table(rows: dict[str, list[str]]) -> str:
    """The matrix in Markdown."""
    lines = [["layout", "what it is", *COLUMNS]]
    lines += [[name, described(LAYOUTS[name]), *cells] for name, cells in rows.items()]
    lines.insert(1, ["---"] * 2 + ["---:"] * len(COLUMNS))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(matrix: str) -> str:
    """The page of the documentation that shows the matrix."""
    tolerances = ", ".join(f"{bound:g} in `{precision}`" for precision, bound in TOLERANCE.items())
    return f"""# The certificate

<!-- Written by `python -m tests.certificate --write docs/certificate.md`; do not edit by hand. -->

Each row is a layout, each column a model and a precision. A cell is the largest deviation from one device in plain
torch: over the losses of {NUM_STEPS} steps, every gradient, the gradient norm, the weights after the steps and the
logged values, on all ranks. Deviations are absolute. The tolerances are {tolerances};
a bold cell is outside of them.

The other side of the comparison is `tests/reference/gpt.py`, a GPT in plain torch, under a hand-written loop and SGD
with momentum, or AdamW where the row says so. It takes from the package the configuration, the initial values and the
random numbers of dropout, and nothing else.

The data tries to break the layouts: global batches of {BATCH} rows of {SEQUENCE} tokens, loss masks that are
uneven over the rows, a first microbatch without any valid token, a global batch whose first replica has none, a
vocabulary of 131 that no tensor-parallel size divides, and streams that sequence parallelism must pad.

{matrix}

Made with torch {torch.__version__}, lightning {lightning.__version__}, Python {platform.python_version()} on
{platform.machine()} CPUs, with gloo between the processes. NCCL and several GPUs were not there to be tested.

`make certificate` makes the table anew; `make test` holds every cell to its tolerance.
"""


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.certificate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), help="some rows only")
    parser.add_argument("--write", type=Path, metavar="FILE", help="a Markdown page to write the whole table to")
    arguments = parser.parse_args()
    if arguments.write and len(arguments.layouts) < len(LAYOUTS):
        parser.error("--write takes the whole table; leave --layouts out")
    torch.set_num_threads(1)
    rows: dict[str, list[str]] = {}
    faults: list[str] = []
    for name in arguments.layouts:
        began_seconds = time.perf_counter()
        rows[name], found = row_of(name)
        faults += found
        seconds = time.perf_counter() - began_seconds
        print(f"{len(rows)} of {len(arguments.layouts)}: {name}, {seconds:.0f} s", file=sys.stderr, flush=True)
    print(table(rows))
    if faults:
        print("\n".join(["", f"{len(faults)} cells are not within their tolerance:", *faults]), file=sys.stderr)
        return 1
    if arguments.write:
        arguments.write.write_text(page(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
