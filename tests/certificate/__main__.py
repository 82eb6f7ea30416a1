"""Prints the certificate as a table: how far each layout is from one device, for every model and precision.

    python -m tests.certificate                                   # the table; progress goes to stderr
    python -m tests.certificate --write docs/certificate.md       # and the page of the documentation
    python -m tests.certificate --layouts tp2 pp2                 # some rows only
    python -m tests.certificate --families gemma2 olmo2           # families of transformers alone; without names all
    python -m tests.certificate --device cuda --layouts tp2 pp2   # over NCCL, all ranks on one GPU

A cell is the largest deviation over losses, gradients, gradient norms, weights and logged values, over all steps and
ranks. Exits with 1 where a cell is not within the tolerance of its precision.
"""

import argparse
import contextlib
import io
import math
import os
import platform
import sys
import time
from pathlib import Path

import lightning
import torch

from tests.certificate.cases import (
    BATCH,
    CELLS,
    HALF_LAYOUTS,
    HALF_ROUNDINGS,
    HALF_ROUNDOFF,
    LAYOUTS,
    NUM_STEPS,
    SEQUENCE,
    TOLERANCE,
    Layout,
    cells_of,
)
from tests.certificate.compare import HALF_QUANTITIES, deviations, half_bound, half_deviations, outcomes
from tests.certificate.families import FAMILIES, FAMILY_LAYOUTS, fault_of, layouts_of, results_of
from tests.certificate.families import NUM_STEPS as FAMILY_STEPS
from tests.certificate.families import TOLERANCE as FAMILY_TOLERANCE
from tests.certificate.runs import HALF_REACH
from tests.harness.device import CHOICE

COLUMNS = [f"{variant}, {precision}" for variant, precision in CELLS]
HALF_COLUMNS = [
    f"{precision}, {quantity}" for precision, quantities in HALF_QUANTITIES.items() for quantity in quantities
]
ALL_LAYOUTS = LAYOUTS | HALF_LAYOUTS


def row_of(layout: str) -> tuple[list[str], list[str]]:
    """The cells of a layout, and what is wrong with them, one line each."""
    own = cells_of(layout)
    try:
        # What the ranks print is Lightning's banner, once for every fit.
        with contextlib.redirect_stdout(io.StringIO()):
            ran = dict(zip(own, outcomes(layout, own), strict=True))
    except Exception as error:
        # One failure must not hide the other rows.
        return ["failed" if cell in own else "–" for cell in CELLS], [f"{layout}: {error}"]
    cells, faults = [], []
    for cell in CELLS:
        if cell not in ran:
            cells.append("–")
            continue
        try:
            found = deviations(layout, cell, ran[cell])
        except AssertionError as error:
            cells.append("failed")
            faults.append(f"{layout}, {', '.join(cell)}: {error}")
            continue
        largest, tolerance = max(found.values()), TOLERANCE[cell[1]]
        cells.append(f"{largest:.0e}")
        if not largest < tolerance:
            cells[-1] = f"**{cells[-1]}**"
            faults.append(f"{layout}, {', '.join(cell)}: {found}, the tolerance is {tolerance:g}")
    return cells, faults


def half_row_of(layout: str) -> tuple[list[str], list[str]]:
    """The cells of a layout in 16 bits, and what is wrong with them, one line each."""
    cells, faults = [], []
    for precision, quantities in HALF_QUANTITIES.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                found = half_deviations(layout, precision)
        except Exception as error:
            cells += ["failed"] * len(quantities)
            faults.append(f"{layout}, {precision}: {error}")
            continue
        for quantity, deviation in found.items():
            cells.append(f"{deviation:.0e}")
            bound = half_bound(layout, precision, quantity)
            if not deviation <= bound:
                cells[-1] = f"**{cells[-1]}**"
                faults.append(f"{layout}, {precision}, {quantity}: {deviation:g}, the bound is {bound:g}")
    return cells, faults


def described(layout: Layout) -> str:
    """The layout as processes and the settings that are not their defaults."""
    settings = [
        (layout.tp > 1, f"tp {layout.tp}"),
        (layout.sp, "sp"),
        (layout.pp > 1, f"pp {layout.pp}"),
        (layout.vp > 1, f"vp {layout.vp}"),
        (layout.cp > 1, f"cp {layout.cp} ({layout.context.comm_type})"),
        (layout.dynamic is not None, "dynamic context"),
        (layout.ep > 1, f"ep {layout.ep}"),
        (layout.etp > 1, f"etp {layout.etp}"),
        (layout.joint, "forwards beside backwards"),
        (layout.schedule != "auto", f"schedule {layout.schedule}"),
        (layout.dp > 1, f"dp {layout.dp}"),
        (layout.microbatches > 1, f"{layout.microbatches} microbatches"),
        (layout.collective, "collective mode"),
        (layout.accumulate > 1, f"accumulate {layout.accumulate}"),
        (layout.clip is not None, f"clip {layout.clip}"),
        (layout.distributed, "distributed optimizer"),
        (layout.sharded, "distributed optimizer and gradients"),
        (layout.params != "whole", f"distributed optimizer, gradients and parameters, {layout.params}"),
        (layout.shard_size > 0, f"shards over {layout.shard_size}"),
        (layout.offload, "optimizer on the host"),
        (layout.overlap, "overlap"),
        (layout.rule.startswith("adamw"), "AdamW"),
        (layout.rule == "muon", "Muon"),
        (layout.recompute.offload, "activations on the host"),
        (layout.recompute.granularity == "full", "recomputation of layers"),
        (layout.recompute.granularity == "selective", f"recomputation of {', '.join(layout.recompute.parts)}"),
    ]
    return ", ".join([f"{layout.world} rank{'s'[: layout.world > 1]}", *(text for holds, text in settings if holds)])


def table(rows: dict[str, list[str]], columns: list[str]) -> str:
    """The rows in Markdown."""
    lines = [["layout", "what it is", *columns]]
    lines += [[name, described(ALL_LAYOUTS[name]), *cells] for name, cells in rows.items()]
    lines.insert(1, ["---"] * 2 + ["---:"] * len(columns))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(matrix: str, half_matrix: str, families: str) -> str:
    """The page of the documentation that shows the matrices."""
    bounds = {
        quantity: " and ".join(
            f"{half_bound(next(iter(HALF_LAYOUTS)), precision, quantity):.0e} in `{precision}`"
            for precision in HALF_QUANTITIES
        )
        for quantity in HALF_ROUNDINGS
    }
    tolerances = ", ".join(f"{bound:g} in `{precision}`" for precision, bound in TOLERANCE.items())
    return f"""# The certificate

<!-- Written by `python -m tests.certificate --write docs/certificate.md`; do not edit by hand. -->

Each row is a layout, each column a model and a precision. A cell is the largest deviation from one device in plain
torch: over the losses of {NUM_STEPS} steps, every gradient, the gradient norm, the weights after the steps and the
logged values, on all ranks. Deviations are absolute. The tolerances are {tolerances};
a bold cell is outside of them.

The other side of the comparison is in plain torch: `tests/reference/gpt.py`, with the experts of
`tests/reference/moe.py`, `tests/reference/bert.py`, `tests/reference/t5.py` and `tests/reference/llava.py`, under a
hand-written loop and SGD with momentum, or AdamW where the row says so. It takes from the package the configuration,
the initial values and the random numbers of dropout and jitter, and nothing else.

The data tries to break the layouts: global batches of {BATCH} rows of {SEQUENCE} tokens, loss masks that are
uneven over the rows, a first microbatch without any valid token, a global batch whose first replica has none, a
vocabulary of 131 that no tensor-parallel size divides, and streams that sequence and context parallelism must pad. Rows
of *packed* hold several documents of one token and more, and padding. Rows of dynamic context parallelism have the
models whose documents and random draws could get lost on their way; rows of 8 ranks have 64-true alone.

Models with experts are compared in what their routers do, too: how many tokens chose and got each expert, the auxiliary
losses, the bias of each expert and the shares of the global batch, after each step.

- *moe*: top-2 of 8 experts in every second layer, with a hidden size of their own; auxiliary losses per sequence and
  over the global batch, z-loss and the bias update; a shared expert with a gate; dropout. Two experts get no token of
  the whole batch: with ep 4 they are all that one rank has.
- *moe top-1*: top-1 of 4 experts in three layers; auxiliary loss and z-loss; a capacity of the even share, filled up,
  that drops the choices of the least weight; the all-gather dispatcher.
- *moe packed*: packed documents and padding; top-4 of 8 experts in two layers, of the 2 best of 4 groups; sigmoid
  scores, jitter, auxiliary losses and the bias update; a shared expert without a gate; a capacity below the even share
  that drops the last tokens.

Other models than GPTs are in some of the rows:

- *bert*: norms behind each half of a layer, a tied head, both heads, dropout, a vocabulary of 131. Rows of 1 to
  {SEQUENCE} tokens and one of none; one in three has no target of sentence order.
- *bert pre-norm*: norms before each half of a layer, a head of its own, groups of queries, label smoothing; the same
  rows.
- *t5*: two layers of either stack, relative positions, one embedding for all, dropout of all kinds; rows that are
  padded in either stack, one of which the encoder does not read at all.
- *t5 v1.1 packed*: one layer of the encoder and three of the decoder, gated, with a head of its own, dropout; rows of
  two documents, of which some have no first one in the encoder, or in the decoder.
- *llava*: a Llama with a vision tower of two layers, dropout in both; rows with no image, one and two; a microbatch
  and a replica without any, and a whole step.
- *llava frozen tower*, *llava projector alone*: the same rows, and parts of the model that are not trained.

Rows of expert parallelism have models with experts alone. Experts are cut over ranks that tensor, context and data
parallelism use for the layers around them.

{matrix}

## 16 bits

Here a model with dropout and a tied output layer is trained with rates that halve after each step. In `16-mixed` one
gradient is made infinite in the second step, on the last rank alone; the loss scale doubles after every good step and
halves after a bad one. Under expert parallelism every second layer has experts, the gradient is that of one of them,
and biases make every token choose the same two: no rounding changes a choice. The cells are, over all ranks:

- *left out*: the largest change of any weight, bias of a router, optimizer state or rate in the second step. It must
  be 0.
- *scale*: the largest deviation, after any step, of the loss scale from that on one device. It must be 0.
- *one device*: the largest deviation of the weights after {NUM_STEPS} steps from those of one device in the same
  precision, by this package. Below {bounds["one device"]}.
- *float32*: that from one device in plain torch in float32, where the second step is left out by hand for `16-mixed`.
  Below {bounds["float32"]}.

The bounds follow from rounding. A number rounded to 16 bits is off by at most u of itself, 2^-11 in float16 and 2^-8
in bfloat16, and n independent roundings amount to about sqrt(n) u. From one device a layout differs in the sums that
it cuts: two in a layer each way and one at each end, n = {HALF_ROUNDINGS["one device"]}. From float32 16 bits differ
in all that they round: about ten in a layer each way and three at each end, n = {HALF_ROUNDINGS["float32"]}. By so
much of the largest gradient is a gradient off, and the steps make {HALF_REACH:.2g} of it. A wrong factor or a step too
many is off by about the whole of that, more than {int(_bite())} times the bounds.

{half_matrix}

## Families of transformers

A small model of each family in this package's own layers, beside itself on one device: the largest deviation over the
losses of {FAMILY_STEPS} steps, every gradient, the gradient norm and the weights after the steps, relative to the
largest value. The tolerance is {FAMILY_TOLERANCE:g} in `64-true`. *deepseek_v3* has latent attention and experts, *MTP*
heads that predict further tokens. [Layouts by short names](certify.md) are those of `certify`.

{families}

Made with torch {torch.__version__}, lightning {lightning.__version__}, Python {platform.python_version()} on
{platform.machine()} CPUs, with gloo between the processes.
Some of the rows were run [on a GPU](benchmarks/gpu.md), with NCCL.

`make certificate` makes the tables anew. `make test` holds [a sample of the cells](suite.md) to the same tolerances.
"""


def table_of_families(families: list[str]) -> tuple[str, list[str]]:
    """The table of families of transformers in Markdown, and what is wrong with it, one line each."""
    columns: dict[str, dict[str, str]] = {}
    faults: list[str] = []
    for family in families:
        began_seconds = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            results = results_of(family, layouts_of(family))
        columns[family] = {one.layout.name: f"{max(one.largest.values(), default=math.nan):.0e}" for one in results}
        faults += [f"{family}: {fault}" for result in results if (fault := fault_of(result))]
        seconds = time.perf_counter() - began_seconds
        print(f"{len(columns)} of {len(families)}: {family}, {seconds:.0f} s", file=sys.stderr, flush=True)
    lines = [["layout", *families], ["---"] + ["---:"] * len(families)]
    lines += [[layout, *(columns[family].get(layout, "–") for family in families)] for layout in FAMILY_LAYOUTS]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines), faults


def _bite() -> float:
    """How much larger than the widest bound a weight's whole change is."""
    widest = max(HALF_ROUNDINGS.values()) ** 0.5 * max(HALF_ROUNDOFF.values())
    return 1 / widest


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.certificate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=list(ALL_LAYOUTS),
        default=list(ALL_LAYOUTS),
        metavar="ROW",
        help="some rows only",
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="of the layouts; one device is the CPU"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="a Markdown page to write all of it to")
    parser.add_argument(
        "--families",
        nargs="*",
        choices=list(FAMILIES),
        metavar="FAMILY",
        help="families of transformers instead of the rows",
    )
    arguments = parser.parse_args()
    if arguments.families is not None:
        torch.set_num_threads(1)
        shown, faults = table_of_families(arguments.families or list(FAMILIES))
        print(shown)
        print("\n".join(faults), file=sys.stderr)
        return 1 if faults else 0
    if arguments.write and len(arguments.layouts) < len(ALL_LAYOUTS):
        parser.error("--write takes all rows; leave --layouts out")
    if arguments.write and arguments.device != "cpu":
        parser.error("--write is for the page of the CPU; leave --device out")
    os.environ[CHOICE] = arguments.device
    torch.set_num_threads(1)
    rows: dict[str, list[str]] = {}
    faults = []
    for name in arguments.layouts:
        began_seconds = time.perf_counter()
        rows[name], found = row_of(name) if name in LAYOUTS else half_row_of(name)
        faults += found
        seconds = time.perf_counter() - began_seconds
        print(f"{len(rows)} of {len(arguments.layouts)}: {name}, {seconds:.0f} s", file=sys.stderr, flush=True)
    plain = {name: cells for name, cells in rows.items() if name in LAYOUTS}
    half = {name: cells for name, cells in rows.items() if name in HALF_LAYOUTS}
    matrix, half_matrix, families = table(plain, COLUMNS), table(half, HALF_COLUMNS), ""
    if arguments.write:
        families, found = table_of_families(list(FAMILIES))
        faults += found
    print("\n\n".join([matrix] * bool(plain) + [half_matrix] * bool(half)))
    if faults:
        print("\n".join(["", f"{len(faults)} cells are not within their tolerance:", *faults]), file=sys.stderr)
        return 1
    if arguments.write:
        arguments.write.write_text(page(matrix, half_matrix, families))
    return 0


if __name__ == "__main__":
    sys.exit(main())
