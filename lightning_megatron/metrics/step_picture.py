"""One step as a picture: blocks of rows under each other on one axis of time, measured and predicted; SVG by hand.

A row is a rank, a bar what it did. Colours of computes are those of `pipeline.picture`, a later chunk of a rank is
lighter; the others are further ones of Okabe and Ito.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from lightning_megatron.metrics.step_timeline import (
    BACKWARD,
    CLIP,
    DATA,
    FORWARD,
    GATHER,
    OPTIMIZER,
    REDUCE,
    Lap,
    in_words,
    lane_of,
)
from lightning_megatron.pipeline.picture import IDLE, INK, NAMES, colour_of, ink_on, round_moments
from lightning_megatron.pipeline.schedule import Action, Kind
from lightning_megatron.pipeline.step_hooks import Activity

_WAITING = "#c4c4c4"
_COLOURS = {
    FORWARD: colour_of(Kind.FORWARD, 0, 1),
    BACKWARD: colour_of(Kind.BACKWARD, 0, 1),
    DATA: "#f0e442",
    REDUCE: "#cc79a7",
    GATHER: "#56b4e9",
    CLIP: "#8a8a8a",
    OPTIMIZER: "#444444",
}
_WAITS = "waiting for a message"
# What lies below and what on top, where several were done at a time.
_ORDER = ("messages", "data", "backward", "forward", "replicas", "optimizer")

# All in pixels.
_LEFT, _RIGHT, _TOP, _BOTTOM = 130, 18, 74, 40
_ROW, _GAP, _HEADING = 20, 3, 24
_FONT = 10
_SWATCH = 12
_NARROWEST, _WIDEST = 640, 2_000
# More bars than this are one path for each row and colour, without texts.
_MOST_BARS = 12_000


@dataclass(frozen=True, kw_only=True)
class Row:
    """A rank."""

    label: str
    laps: tuple[Lap, ...]
    stages: tuple[int, ...] = ()
    """Its chunks, of which later ones are lighter."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Ranks under one heading."""

    heading: str
    rows: tuple[Row, ...]


def svg_of_step(blocks: Sequence[Block], *, title: str) -> str:
    """The text of an SVG file; milliseconds from the earliest start of all blocks. Bars tell what they are under the
    mouse."""
    laps = [lap for block in blocks for row in block.rows for lap in row.laps]
    begin, end = min(lap.start for lap in laps), max(lap.end for lap in laps)
    bars_width = _width_of(laps, end - begin)
    scale = bars_width / (end - begin)
    legend = _legend(blocks)
    width = math.ceil(max(_LEFT + bars_width, legend[-1].end) + _RIGHT)
    height = _TOP + sum(_HEADING + len(block.rows) * (_ROW + _GAP) for block in blocks) + _BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-labelledby="title" font-family="sans-serif" font-size="{_FONT}" fill="{INK}">',
        f'<title id="title">{escape(title)}</title>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
        *(line for entry in legend for line in entry.lines()),
    ]
    y, is_small = _TOP, len(laps) <= _MOST_BARS
    for block in blocks:
        lines.append(f'<text x="{_LEFT}" y="{y + 16}" font-size="12">{escape(block.heading)}</text>')
        y += _HEADING
        for row in block.rows:
            lines += [
                '<g class="row">',
                f'<text x="{_LEFT - 6}" y="{y + _ROW / 2 + 3.5:g}" text-anchor="end">{escape(row.label)}</text>',
                f'<rect class="idle" x="{_LEFT}" y="{y}" width="{bars_width:g}" height="{_ROW}" fill="{IDLE}"/>',
                *(_bars(row, y, begin, scale) if is_small else _paths(row, y, begin, scale)),
                "</g>",
            ]
            y += _ROW + _GAP
    lines += [*_axis(y + 3, bars_width, (end - begin) * 1e3), "</svg>", ""]
    return "\n".join(lines)


def _width_of(laps: Sequence[Lap], seconds: float) -> float:
    """So wide that the usual compute has room for its number, within bounds."""
    lengths = sorted(lap.seconds for lap in laps if lap.is_compute and lap.seconds > 0)
    wanted = seconds * 3 * _FONT / lengths[len(lengths) // 2] if lengths else 0
    return min(max(wanted, _NARROWEST), _WIDEST)


def _colour(activity: Activity, row: Row) -> str:
    if isinstance(activity, str):
        return _COLOURS.get(activity, _WAITING)
    lane = lane_of(activity)
    if lane == "replicas":
        return _COLOURS[REDUCE if activity.kind is Kind.REDUCE_GRADS else GATHER]
    if lane == "messages":
        return _WAITING
    return colour_of(activity.kind, row.stages.index(activity.stage), len(row.stages))


def _entry(activity: Activity) -> str:
    """The legend's name of an activity."""
    if isinstance(activity, str):
        return activity if activity in _COLOURS else _WAITS
    if activity.kind in NAMES:
        return NAMES[activity.kind]
    return {Kind.REDUCE_GRADS: REDUCE, Kind.GATHER_PARAMS: GATHER}.get(activity.kind, _WAITS)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One of the legend."""

    x: int
    colours: list[str]
    text: str

    @property
    def end(self) -> int:
        return self.x + len(self.colours) * _SWATCH + 20 + round(len(self.text) * 0.6 * _FONT)

    def lines(self) -> Iterator[str]:
        for place, colour in enumerate(self.colours):
            x = self.x + place * _SWATCH
            yield f'<rect x="{x}" y="36" width="{_SWATCH}" height="{_SWATCH}" fill="{colour}"/>'
        yield f'<text x="{self.x + len(self.colours) * _SWATCH + 5}" y="46">{escape(self.text)}</text>'


def _legend(blocks: Sequence[Block]) -> list[_Entry]:
    """An entry for each thing that was done, with its colours."""
    entries: dict[str, list[str]] = {}
    for row in (row for block in blocks for row in block.rows):
        for lap in row.laps:
            colours = entries.setdefault(_entry(lap.activity), [])
            if (colour := _colour(lap.activity, row)) not in colours:
                colours.append(colour)
    found: list[_Entry] = []
    for text, colours in [*entries.items(), ("nothing", [IDLE])]:
        found.append(_Entry(x=found[-1].end if found else _LEFT, colours=sorted(colours), text=text))
    return found


def _in_order(row: Row) -> list[Lap]:
    return sorted(row.laps, key=lambda lap: (_ORDER.index(lane_of(lap.activity)), lap.start))


def _bars(row: Row, y: int, begin: float, scale: float) -> Iterator[str]:
    for lap in _in_order(row):
        x, width, colour = _LEFT + (lap.start - begin) * scale, lap.seconds * scale, _colour(lap.activity, row)
        hint = f"{in_words(lap.activity)}: {(lap.start - begin) * 1e3:.4g} to {(lap.end - begin) * 1e3:.4g} ms"
        yield (
            f'<rect class="{lane_of(lap.activity)}" x="{x:.7g}" y="{y}" width="{width:.7g}" height="{_ROW}" '
            f'fill="{colour}" stroke="white" stroke-width="0.3"><title>{escape(hint)}</title></rect>'
        )
        if lap.is_compute and isinstance(lap.activity, Action):
            number = str(lap.activity.microbatch)
            if width >= len(number) * 0.6 * _FONT + 4:
                yield (
                    f'<text x="{x + width / 2:.6g}" y="{y + _ROW / 2 + 3.5:g}" fill="{ink_on(colour)}" '
                    f'text-anchor="middle" pointer-events="none">{number}</text>'
                )


def _paths(row: Row, y: int, begin: float, scale: float) -> Iterator[str]:
    strokes: dict[str, list[str]] = {}
    for lap in _in_order(row):
        x = _LEFT + (lap.start - begin) * scale
        strokes.setdefault(_colour(lap.activity, row), []).append(
            f"M{x:.6g} {y + _ROW / 2:g}h{lap.seconds * scale:.4g}"
        )
    for colour, moves in strokes.items():
        yield f'<path stroke="{colour}" stroke-width="{_ROW}" fill="none" d="{"".join(moves)}"/>'


def _axis(y: int, width: float, milliseconds: float) -> Iterator[str]:
    yield f'<path d="M{_LEFT} {y}h{width:g}" stroke="{INK}"/>'
    for tick in round_moments(milliseconds):
        x = _LEFT + tick / milliseconds * width
        yield f'<path d="M{x:.6g} {y}v5" stroke="{INK}"/>'
        yield f'<text x="{x:.6g}" y="{y + 16}" text-anchor="middle">{tick:g}</text>'
    yield f'<text x="{_LEFT + width:g}" y="{y + 29}" text-anchor="end">milliseconds</text>'
