"""Trains a tiny twin of each model of the installed transformers, unchanged, and other networks, beside one device.

    python -m tests.any_module.models_table [--families causal masked ...] [--types llama qwen3 ...]
        [--layouts pp2 tp2 ...] [--results FOLDER] [--write PAGE]

A cell is the largest deviation from one device, relative to the largest value of each tensor, of losses, every
gradient, the gradient norm and the weights over three steps of AdamW in float64; or why there is none. What the models
compute in float32 is computed in float64 on both sides. With a folder of results, what is in it is not run again.
"""

import argparse
import functools
import json
import re
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers

from lightning_megatron.testing import CertifyError, certify
from tests.any_module.model_families import FAMILIES
from tests.any_module.network_families import Family

_WHAT = """\
`python -m tests.any_module.models_table` trains a tiny twin of each model of the installed transformers, as it is, on
layouts and on one device. A cell is the largest deviation, relative to the largest value of each tensor, of losses,
every gradient, the gradient norm and the weights over three steps of AdamW in float64; or a number in brackets, for the
reason below. What the models compute in float32 is computed in float64 on both sides. Rows were gathered over several
commits. The networks of other kinds, which come last, are those of `tests/any_module/network_families.py`."""

_ROUNDING = 1e-12

Row = dict[str, str]
"""Cells of a type, by layout."""


def row_of(family: Family, model_type: str, layouts: tuple[str, ...]) -> Row:
    """What each layout gave: the largest deviation, or a reason."""
    make_batches = functools.partial(family.batches, model_type)
    try:
        found = certify(functools.partial(family, model_type), make_batches, layouts=layouts, steps=3)
    except (CertifyError, ValueError) as error:
        return dict.fromkeys(layouts, f"one device: {_short(str(error))}")
    row = {}
    for result in found.results:
        largest = max(result.largest.values(), default=float("nan"))
        number = f"{largest:.0e}" + ("" if found.facts.precision == "64-true" else " in float32")
        # What differs is told where a run warns of it: buffers that each microbatch moves.
        differs = f"warned of: {_short(result.warnings[0])}" if result.warnings else f"differs: {number}"
        told = {"equal": number, "differs": differs}
        row[result.layout.name] = told.get(result.verdict, f"{result.verdict}: {_short(result.message)}")
    return row


def _short(message: str) -> str:
    words = " ".join(message.split()).removeprefix("this configuration cannot run: - ")
    return words.removeprefix("the module does not train on one device: ")[:110]


def _reason(cell: str) -> str:
    """Why there is no number, without the place in a file and the rank."""
    return re.sub(r"\brank \d+: ", "", re.sub(r" ?\(/[^ ]*$", "", cell))


def is_number(cell: str) -> bool:
    """Whether a cell says that its layout computes one device's numbers."""
    return cell[:1].isdigit()


def page_of(tables: dict[str, dict[str, Row]]) -> str:
    """The tables of the families, and the reasons that their cells point to."""
    reasons: dict[str, int] = {}
    text = [
        "# Models of transformers and other networks, unchanged",
        "",
        "<!-- Written by `make models-table`; do not edit by hand. -->",
    ]
    text += ["", _WHAT, "", _beyond(tables), ""]
    text += [f"transformers {transformers.__version__}, torch {torch.__version__}."]
    for name, rows in tables.items():
        title, family = FAMILIES[name]
        counts = Counter(layout for row in rows.values() for layout, cell in row.items() if is_number(cell))
        trained = sum(not all(cell.startswith("one device") for cell in row.values()) for row in rows.values())
        text += ["", f"## {title}", "", f"{len(rows)} types, of which {trained} train on one device;"]
        text += [f"equal to it: {', '.join(f'{layout} {counts[layout]}' for layout in family.layouts)}.", ""]
        text += [f"| type | {' | '.join(family.layouts)} |", f"|---|{'---:|' * len(family.layouts)}"]
        for model_type, row in sorted(rows.items()):
            cells = []
            for layout in family.layouts:
                cell = row.get(layout, "not run")
                cells.append(cell if is_number(cell) else f"[{reasons.setdefault(_reason(cell), len(reasons) + 1)}]")
            text.append(f"| {model_type} | {' | '.join(cells)} |")
    text += ["", "## Reasons", "", "```text", *(f"[{number}] {reason}" for reason, number in reasons.items()), "```"]
    return "\n".join([*text, ""])


def _beyond(tables: dict[str, dict[str, Row]]) -> str:
    """How many of the numbers are above what a sum in another order adds by itself, and why."""
    numbers = [
        float(cell.split()[0])
        for rows in tables.values()
        for row in rows.values()
        for cell in row.values()
        if is_number(cell)
    ]
    above = sum(number > _ROUNDING for number in numbers)
    found = f"{len(numbers) - above:,} of {len(numbers):,} numbers are at most {_ROUNDING:.0e}"
    if not above:
        return f"{found}."
    return (
        f"{found}. The other {above} are up to {max(numbers):.0e}: "
        "rounding\nthat something makes larger, as AdamW does, "
        "which divides a gradient by its own size. `certify` calls equal what is\nbelow 1e-9."
    )


def main() -> int:
    """Runs what has no result yet, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--types", nargs="*", help="of each family; all where none is named")
    parser.add_argument("--layouts", nargs="*", help="of each family's; all where none is named")
    parser.add_argument("--results", type=Path, help="folder of results, which grow")
    parser.add_argument("--write", type=Path, help="write the page here")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    tables: dict[str, dict[str, Row]] = {}
    for name in options.families:
        _, family = FAMILIES[name]
        kept = options.results / f"{name}.json" if options.results else None
        rows: dict[str, Row] = json.loads(kept.read_text()) if kept and kept.exists() else {}
        tables[name] = rows
        for model_type in sorted(set(family.types) & set(options.types or family.types)):
            wanted = [layout for layout in family.layouts if layout in (options.layouts or family.layouts)]
            missing = tuple(layout for layout in wanted if layout not in rows.get(model_type, {}))
            if missing:
                found = row_of(family, model_type, missing)
                rows.setdefault(model_type, {}).update(found)
                print(model_type, *(f"{layout}: {cell}" for layout, cell in found.items()), sep="\n    ", flush=True)
                if kept:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    kept.write_text(json.dumps(rows, indent=1))
    if options.write:
        options.write.write_text(page_of(tables))
    cells = [cell for rows in tables.values() for row in rows.values() for cell in row.values()]
    return int(any(cell.startswith("differs") for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
