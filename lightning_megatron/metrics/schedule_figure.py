"""Bars of what ranks do in a step, for `timeline_figure`: those of a schedule's timeline and of a measured step.

The colours are Okabe's and Ito's, which the colour-blind can distinguish; a later chunk of a rank is lighter.
"""

from collections.abc import Iterable, Sequence
from functools import cache

from lightning_megatron.metrics.step_timeline import (
    CLIP,
    DATA,
    GATHER,
    KIND_WORDS,
    OPTIMIZER,
    REDUCE,
    ActivitySpan,
    lane_of,
)
from lightning_megatron.metrics.timeline_figure import Bar, Panel, Row
from lightning_megatron.pipeline.schedule import COMPUTES, Action, Kind
from lightning_megatron.pipeline.simulate import Timeline
from lightning_megatron.pipeline.step_hooks import Activity

_COLOURS = {
    KIND_WORDS[Kind.FORWARD]: (0, 114, 178),
    KIND_WORDS[Kind.BACKWARD]: (230, 159, 0),
    KIND_WORDS[Kind.BACKWARD_INPUT]: (213, 94, 0),
    KIND_WORDS[Kind.BACKWARD_WEIGHT]: (0, 158, 115),
    DATA: (240, 228, 66),
    REDUCE: (204, 121, 167),
    GATHER: (86, 180, 233),
    CLIP: (138, 138, 138),
    OPTIMIZER: (68, 68, 68),
}
_WAITS = "waiting for a message"
_WAITING = (196, 196, 196)
# Lanes from bottom to top, where several things were done at a time.
_ORDER = ("messages", "data", "backward", "forward", "data-parallel", "optimizer")


def schedule_panel(timeline: Timeline, *, unit: str, heading: str = "") -> Panel:
    """A panel with a row for each rank and a bar for each compute; numbers are microbatches."""
    rows = []
    for rank, spans in enumerate(timeline.spans):
        stages = sorted({span.action.stage for span in spans})
        bars = (_bar(span.action, span.start, span.end, stages) for span in spans if span.end > span.start)
        rows.append(Row(f"rank {rank}", tuple(bars)))
    return Panel(rows=rows, unit=unit, heading=heading, idle="idle")


def step_row(label: str, spans: Iterable[ActivitySpan], stages: Sequence[int], *, begin: float) -> Row:
    """What a rank with these stages did, in milliseconds after `begin`."""
    ordered = sorted(spans, key=lambda span: (_ORDER.index(lane_of(span.activity)), span.start))
    return Row(
        label,
        tuple(_bar(span.activity, (span.start - begin) * 1e3, (span.end - begin) * 1e3, stages) for span in ordered),
    )


def _bar(activity: Activity, start: float, end: float, stages: Sequence[int]) -> Bar:
    entry = _entry(activity)
    if isinstance(activity, Action) and activity.kind in COMPUTES:
        colour = _lightened(entry, stages.index(activity.stage), len(stages))
        return Bar(start, end, colour, entry, str(activity.microbatch))
    return Bar(start, end, _lightened(entry, 0, 1), entry)


def _entry(activity: Activity) -> str:
    """The legend's name of an activity."""
    if isinstance(activity, str):
        return activity if activity in _COLOURS else _WAITS
    if activity.kind in COMPUTES:
        return KIND_WORDS[activity.kind]
    return {Kind.REDUCE_GRADS: REDUCE, Kind.GATHER_PARAMS: GATHER}.get(activity.kind, _WAITS)


@cache
def _lightened(entry: str, chunk: int, num_chunks: int) -> str:
    """The colour of a legend's name, lighter by chunk, up to two thirds of the way to white."""
    lightness = 0.67 * chunk / max(num_chunks - 1, 1)
    parts = (round(part + (255 - part) * lightness) for part in _COLOURS.get(entry, _WAITING))
    return "#" + "".join(f"{part:02x}" for part in parts)
