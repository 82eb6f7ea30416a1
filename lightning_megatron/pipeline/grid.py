"""Plans as text, in errors: a line for each rank, a column for each step, and the position of an error marked."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

from lightning_megatron.pipeline.lower import Plan
from lightning_megatron.pipeline.schedule import ScheduleError

PlanPosition = tuple[int, int]
"""A rank and the index of one of its steps."""

_MARGIN = 6
"""Number of steps to show on either side of a mark."""


def plan_fault(plan: Plan, position: PlanPosition, action: str, reason: str) -> ScheduleError:
    """The error that names a position and an action, and shows the position among the steps of all ranks."""
    rank, index = position
    return ScheduleError(f"rank {rank}, step {index}, {action}: {reason}\n{plan_grid(plan, {rank: index})}")


def plan_grid(plan: Plan, marks: Mapping[int, int]) -> str:
    """The steps of all ranks with, by rank, the marked step in `> <`; of a long plan only the part around the marks."""
    first = max(0, min(marks.values(), default=0) - _MARGIN)
    longest = max(map(len, plan), default=0)
    end = min(max(marks.values(), default=longest) + _MARGIN, longest) + 1
    rows = [["step", *map(str, range(first, end))]]
    for rank, steps in enumerate(plan):
        cells = [*map(str, steps), "end"]
        if rank in marks:
            cells[marks[rank]] = f">{cells[marks[rank]]}<"
        rows.append([f"rank {rank}", *cells[first:end]])
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return "\n".join(
        " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows
    )
