"""A certificate as text and as a record for programs."""

import math
from typing import Any

from lightning_megatron.testing.outcome import LayoutResult, Outcome
from lightning_megatron.testing.quantities import MEANINGS, QUANTITIES, Deviation


def text_of(outcome: Outcome) -> str:
    """The table, and below it what differs, what was refused, and what to know."""
    blocks = ["\n".join([*_head(outcome), "", *_table(outcome)])]
    blocks += [_told(results) for results in _alike(outcome)]
    blocks += ["\n".join(_refusals(outcome))] if _refusals(outcome) else []
    blocks += ["\n".join(_notes(outcome))] if _notes(outcome) else []
    return "\n\n".join([*blocks, _end(outcome)])


def _head(outcome: Outcome) -> list[str]:
    facts = outcome.facts
    return [
        f"{facts.module}: {facts.num_parameters:,} parameters, {outcome.steps} steps of {outcome.rows} rows, "
        f"{facts.precision}",
        f"Largest deviation from one device, relative to the largest value of each tensor; equal up to "
        f"{outcome.tolerance:g}.",
    ]


def _table(outcome: Outcome) -> list[str]:
    shown = [name for name in QUANTITIES if any(name in result.largest for result in outcome.results)]
    # The names of layouts stand to the left, numbers to the right.
    longest = max(len("layout"), *(len(result.layout.name) for result in outcome.results))
    rows = [["layout".ljust(longest), "ranks", *shown, "verdict"]]
    for result in outcome.results:
        cells = [_cell(result, name) for name in shown]
        rows.append([result.layout.name.ljust(longest), str(result.layout.world), *cells, result.verdict])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _cell(result: LayoutResult, name: str) -> str:
    value = result.largest.get(name)
    if value is None:
        return "-"
    return f"{value:.0e}" + ("*" if name in result.first else "")


def _alike(outcome: Outcome) -> list[list[LayoutResult]]:
    """Layouts that differ, or fail, with those that do so in the same way."""
    groups: dict[tuple[object, ...], list[LayoutResult]] = {}
    for result in outcome.differing:
        ways = [(one.mend, one.deviation.quantity, one.deviation.name) for one in result.differences]
        groups.setdefault((result.verdict, result.message, *ways), []).append(result)
    return list(groups.values())


def _told(results: list[LayoutResult]) -> str:
    first = results[0]
    names = ", ".join(result.layout.name for result in results)
    lines = [f"{names}: {first.verdict}" + (f", {first.message}" if first.message else "")]
    on = f" ({first.layout.name})" if len(results) > 1 else ""
    for difference in first.differences:
        lines.append(f"  first{on}  {_where(difference.deviation)}")
        lines.append(f"  cause  {difference.cause}")
        lines.append(f"  mend   {difference.mend}")
    return "\n".join(lines)


def _where(one: Deviation) -> str:
    name = "" if one.name in ("loss", "norm") else f" {one.name}"
    is_alone = math.isnan(one.ours) or math.isnan(one.theirs)
    values = "only one of them has it" if is_alone else f"{one.ours:.6g} for {one.theirs:.6g}"
    return f"{one.quantity}{name} of step {one.step}, on rank {one.rank}: {values} ({MEANINGS[one.quantity]})"


def _refusals(outcome: Outcome) -> list[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for result in outcome.results:
        if result.verdict in ("refused", "not run"):
            groups.setdefault((result.verdict, " ".join(result.message.split())), []).append(result.layout.name)
    return [f"{', '.join(names)}: {verdict}, {message}" for (verdict, message), names in groups.items()]


def notes_of(outcome: Outcome) -> list[str]:
    """What a reader must know, one sentence each."""
    facts = outcome.facts
    found = list(facts.notes)
    if facts.float64_error:
        found.append(f"run in float32, because float64 fails: {facts.float64_error}")
    if facts.dropouts:
        found.append(
            f"dropout was turned off in {', '.join(facts.dropouts[:3])}"
            f"{f' and {len(facts.dropouts) - 3} more' if len(facts.dropouts) > 3 else ''}: "
            "microbatches and data-parallel ranks draw other masks than one device"
        )
    if facts.is_random:
        found.append(
            "the loss depends on the seed: every run has the same one, and numbers that are drawn on several ranks or "
            "microbatches differ (dropout of this package's models does not)"
        )
    warned: dict[str, list[str]] = {}
    for result in outcome.results:
        for text in result.warnings:
            warned.setdefault(" ".join(text.split()), []).append(result.layout.name)
    found += [f"warning ({', '.join(names)}): {text}" for text, names in warned.items()]
    return found


def _notes(outcome: Outcome) -> list[str]:
    return [f"note: {text}" for text in notes_of(outcome)]


def _end(outcome: Outcome) -> str:
    counts = {
        verdict: sum(result.verdict == verdict for result in outcome.results)
        for verdict in ("equal", "differs", "failed", "refused", "not run")
    }
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)


def record_of(outcome: Outcome) -> dict[str, Any]:
    """The certificate for a program."""
    facts = outcome.facts
    return {
        "module": facts.module,
        "parameters": facts.num_parameters,
        "precision": facts.precision,
        "tolerance": outcome.tolerance,
        "steps": outcome.steps,
        "rows": outcome.rows,
        "equal": not outcome.differing,
        "notes": notes_of(outcome),
        "layouts": [_record(result) for result in outcome.results],
    }


def _record(result: LayoutResult) -> dict[str, Any]:
    return {
        "layout": result.layout.name,
        "ranks": result.layout.world,
        "verdict": result.verdict,
        "message": result.message,
        "largest": {name: _number(value) for name, value in result.largest.items()},
        "first": {name: _place(one) for name, one in result.first.items()},
        "differences": [_place(one.deviation) | {"cause": one.cause, "mend": one.mend} for one in result.differences],
    }


def _place(one: Deviation) -> dict[str, Any]:
    return {
        "quantity": one.quantity,
        "name": one.name,
        "step": one.step,
        "rank": one.rank,
        "relative": _number(one.relative),
        "value": _number(one.ours),
        "one_device": _number(one.theirs),
    }


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
