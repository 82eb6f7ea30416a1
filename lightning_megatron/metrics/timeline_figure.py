"""Rows of coloured bars, and areas over time, to scale and with a legend: schedules, steps, and memory of ranks.

A figure has panels under each other. Panels of one unit are to one scale, from 0; a legend explains the names that no
panel above has. Lengths of the drawing are points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_megatron.metrics.figure import add_legend, new_figure

if TYPE_CHECKING:
    from lightning_megatron.metrics.figure import Axes, Figure

_IDLE = "#f0f0f0"
_INK = "#222222"
_FONT, _HEADING_FONT, _TITLE_FONT = 9, 11, 13
# Width of one digit of a bar's label, and what a label needs in addition to its digits.
_DIGIT, _LABEL_MARGIN = 0.64 * _FONT, 3
# A row with the gap to the next one, and the share of it that its bars take.
_ROW, _BAR = 23, 0.87
# Rows become lower where all together would be higher than this.
_HIGHEST = 6_000
_TITLE, _HEADING, _LEGEND, _AXIS = 26, 20, 17, 44
_LEGEND_COLUMNS = 7
# Of areas.
_AREAS = 180
_NARROWEST, _WIDEST = 640, 2_000
# More bars are one image without labels, also in an SVG file, which would be too large to look at.
_MOST_BARS = 12_000


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a row."""

    start: float
    end: float
    colour: str
    entry: str
    """Name of the bar in the legend."""
    label: str = ""
    """Text on the bar, where it is wide enough."""


@dataclass(frozen=True, slots=True)
class Row:
    """Row of bars side by side; of bars that overlap, later ones lie on top."""

    label: str
    bars: Sequence[Bar]
    note: str = ""
    """Text after the last bar."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Panel of rows under each other on one axis."""

    rows: Sequence[Row]
    unit: str
    """The axis's label."""
    heading: str = ""
    idle: str = ""
    """The legend's name of what no bar covers; empty leaves it white and unnamed."""
    limit: float = 0
    """Position at which a dashed line crosses all rows; 0 draws none."""


@dataclass(frozen=True, slots=True)
class Area:
    """One of the areas that lie on top of each other."""

    entry: str
    """Name of the area in the legend."""
    colour: str
    heights: Sequence[float]
    """Height at each moment of the panel."""


@dataclass(frozen=True, kw_only=True)
class AreaPanel:
    """Panel of areas on top of each other over one axis, straight from moment to moment."""

    moments: Sequence[float]
    areas: Sequence[Area]
    """Areas from bottom to top."""
    unit: str
    """Label of the axis of moments."""
    height_unit: str
    """Label of the axis of heights."""
    heading: str = ""
    limit: float = 0
    """Height at which a dashed line crosses all areas; 0 draws none."""


def timeline_figure(panels: Sequence[Panel | AreaPanel], *, title: str) -> Figure:
    """The figure of the panels, wide enough for the labels of most bars, within bounds."""
    ends = _ends(panels)
    of_bars = [panel for panel in panels if isinstance(panel, Panel)]
    width = max((_width_of(panel, ends[panel.unit]) for panel in of_bars), default=_NARROWEST)
    has_labels = sum(len(row.bars) for panel in of_bars for row in panel.rows) <= _MOST_BARS
    legends = _legends(panels)
    heights = [min(_ROW * len(one.rows), _HIGHEST) if isinstance(one, Panel) else _AREAS for one in panels]
    heads = [
        _HEADING * bool(panel.heading) + _LEGEND * math.ceil(len(legend) / _LEGEND_COLUMNS)
        for panel, legend in zip(panels, legends, strict=True)
    ]
    height = _TITLE + sum(heads) + sum(heights) + _AXIS * len(panels)
    figure = new_figure(width, height)
    top = height - _TITLE
    figure.text(0, (top + 8) / height, title, fontsize=_TITLE_FONT, color=_INK, va="bottom")
    for panel, legend, head, rows_height in zip(panels, legends, heads, heights, strict=True):
        if panel.heading:
            figure.text(0, (top - 6) / height, panel.heading, fontsize=_HEADING_FONT, color=_INK, va="top")
        top -= head + rows_height
        axes = figure.add_axes((0, top / height, 1, rows_height / height))
        if isinstance(panel, Panel):
            _draw(axes, panel, end=ends[panel.unit], width=width, has_labels=has_labels)
        else:
            _draw_areas(axes, panel, end=ends[panel.unit])
        if legend:
            add_legend(axes, legend, num_columns=_LEGEND_COLUMNS, font_size=_FONT)
        top -= _AXIS
    return figure


def _ends(panels: Sequence[Panel | AreaPanel]) -> dict[str, float]:
    """End of the axis of each unit."""
    ends: dict[str, float] = {}
    for panel in panels:
        if isinstance(panel, Panel):
            last = max(max((bar.end for row in panel.rows for bar in row.bars), default=0.0), panel.limit)
        else:
            last = max(panel.moments)
        ends[panel.unit] = max(ends.get(panel.unit, 0.0), last)
    return ends


def _width_of(panel: Panel, end: float) -> float:
    """Width at which nine of ten bars have room for their labels, within bounds."""
    bars = [bar for row in panel.rows for bar in row.bars if bar.label]
    # Work that was not measured has no length and gives none to the picture.
    lengths = sorted(bar.end - bar.start for bar in bars if bar.end > bar.start)
    if not lengths:
        return _NARROWEST
    wanted = end / lengths[len(lengths) // 10] * max(_label_width(bar) for bar in bars)
    return min(max(wanted, _NARROWEST), _WIDEST)


def _label_width(bar: Bar) -> float:
    return len(bar.label) * _DIGIT + _LABEL_MARGIN


def _legends(panels: Sequence[Panel | AreaPanel]) -> list[dict[str, list[str]]]:
    """Legend of each panel: the colours of each name that no panel above has."""
    known: set[str] = set()
    legends = []
    for panel in panels:
        colours: dict[str, set[str]] = {}
        coloured = panel.areas if isinstance(panel, AreaPanel) else [bar for row in panel.rows for bar in row.bars]
        for one in coloured:
            colours.setdefault(one.entry, set()).add(one.colour)
        entries = {name: sorted(own) for name, own in colours.items()}
        if isinstance(panel, Panel) and panel.idle:
            entries[panel.idle] = [_IDLE]
        legends.append({name: own for name, own in entries.items() if name not in known})
        known |= entries.keys()
    return legends


def _draw_areas(axes: Axes, panel: AreaPanel, *, end: float) -> None:
    _prepare(axes, panel.unit, end=end, hidden=("right", "top"))
    axes.set_ylabel(panel.height_unit, fontsize=_FONT, color=_INK, loc="top")
    below = [0.0] * len(panel.moments)
    for area in panel.areas:
        top = [low + height for low, height in zip(below, area.heights, strict=True)]
        axes.fill_between(panel.moments, below, top, facecolor=area.colour, linewidth=0)
        below = top
    axes.set_ylim(0, 1.05 * max(*below, panel.limit))
    if panel.limit:
        axes.axhline(panel.limit, color=_INK, linewidth=1, linestyle="--")


def _prepare(axes: Axes, unit: str, *, end: float, hidden: Sequence[str]) -> None:
    axes.set_xlim(0, end)
    for side in hidden:
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=_FONT, colors=_INK)
    axes.set_xlabel(unit, fontsize=_FONT, color=_INK, loc="right")


def _draw(axes: Axes, panel: Panel, *, end: float, width: float, has_labels: bool) -> None:
    num_rows = len(panel.rows)
    _prepare(axes, panel.unit, end=end, hidden=("left", "right", "top"))
    axes.set_ylim(num_rows - 0.5, -0.5)
    every = math.ceil(num_rows * _ROW / _HIGHEST)
    axes.set_yticks(range(0, num_rows, every), [row.label for row in panel.rows[::every]])
    axes.tick_params(axis="y", length=0)
    for index, row in enumerate(panel.rows):
        span = (index - _BAR / 2, _BAR)
        if panel.idle:
            axes.broken_barh([(0, end)], span, facecolors=_IDLE)
        if row.bars:
            _draw_bars(axes, row, index, scale=width / end, is_image=not has_labels)
        if row.note:
            axes.annotate(
                row.note,
                (max(bar.end for bar in row.bars), index),
                xytext=(4, 0),
                textcoords="offset points",
                fontsize=_FONT,
                color=_INK,
                va="center",
            )
    if panel.limit:
        axes.axvline(panel.limit, color=_INK, linewidth=1, linestyle="--", clip_on=False)


def _draw_bars(axes: Axes, row: Row, index: int, *, scale: float, is_image: bool) -> None:
    """Draws a row's bars and the labels that fit; `scale` is points of a unit."""
    axes.broken_barh(
        [(bar.start, bar.end - bar.start) for bar in row.bars],
        (index - _BAR / 2, _BAR),
        facecolors=[bar.colour for bar in row.bars],
        edgecolors="white",
        linewidths=[min(0.5, (bar.end - bar.start) * scale / 10) for bar in row.bars],
        rasterized=is_image,
    )
    for bar in row.bars:
        if bar.label and not is_image and (bar.end - bar.start) * scale >= _label_width(bar):
            axes.text(
                (bar.start + bar.end) / 2,
                index,
                bar.label,
                fontsize=_FONT,
                color=_ink_on(bar.colour),
                ha="center",
                va="center_baseline",
                # What lies within the axes need not be measured for the figure's bounds.
                clip_on=True,
            )


def _ink_on(colour: str) -> str:
    """The colour of text on a bar: black or white, whichever stands out."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"
