"""`RecordedStep`: seconds of a step and its parts in a file that `StepTimeline` wrote, to compare them with a plan."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_megatron.metrics.step_timeline import LANES, OPTIMIZER
from lightning_megatron.text_files import read_json

_MICRO = 1e-6
_COMPUTES = LANES[:2]


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A measured step of all ranks of a trace."""

    forwards: tuple[float, ...]
    """Seconds of a microbatch's forward through each stage, their mean."""
    backwards: tuple[float, ...]
    optimizer: float
    """Seconds of the optimizer's own step, the mean of ranks."""
    seconds: float
    """Seconds from the first thing that a rank did to the last."""
    num_microbatches: int
    """Number of microbatches of each batch."""
    num_batches: int
    """Number of batches that the step accumulated."""


def recorded_step(path: Path) -> RecordedStep:
    """The step in a file of `StepTimeline`. Raises ValueError for any other file."""
    try:
        trace = read_json(path)
        names = {one["pid"]: one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "process_name"}
        # Predictions are processes too.
        measured = {number for number, name in names.items() if name.startswith("rank ")}
        events = [one for one in trace["traceEvents"] if one["ph"] == "X" and one["pid"] in measured]
        return _step_of(events)
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{path} is no timeline of a step: give a step_N.json that StepTimeline wrote") from error


def _step_of(events: Sequence[Mapping[str, Any]]) -> RecordedStep:
    seconds: defaultdict[tuple[str, int], float] = defaultdict(float)
    cells: defaultdict[int, set[tuple[int, int, int]]] = defaultdict(set)
    for one in events:
        if one["cat"] in _COMPUTES:
            # Without a schedule there is one stage, and a batch is one microbatch.
            stage, microbatch = one["args"].get("stage", 0), one["args"].get("microbatch", 0)
            seconds[one["cat"], stage] += one["dur"] * _MICRO
            cells[stage].add((one["pid"], one["args"]["batch"], microbatch))
    stages = range(max(cells) + 1)
    steps = [one["dur"] * _MICRO for one in events if one["name"] == OPTIMIZER]
    ends = [one["ts"] + one["dur"] for one in events]
    return RecordedStep(
        forwards=tuple(seconds["forward", stage] / len(cells[stage]) for stage in stages),
        backwards=tuple(seconds["backward", stage] / len(cells[stage]) for stage in stages),
        optimizer=sum(steps) / len(steps),
        seconds=(max(ends) - min(one["ts"] for one in events)) * _MICRO,
        num_microbatches=1 + max(microbatch for own in cells.values() for *_, microbatch in own),
        num_batches=1 + max(batch for own in cells.values() for _, batch, _ in own),
    )
