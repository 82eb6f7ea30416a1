"""A timeline as a picture: a row for each rank, a bar for each compute, to scale; SVG by hand, PNG by matplotlib.

Beside `simulate.draw`, which makes text of the same timeline. The colours are Okabe's and Ito's, which the
colour-blind can tell apart; a later chunk of a rank is lighter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from xml.sax.saxutils import escape

from lightning_megatron.pipeline.schedule import Kind
from lightning_megatron.pipeline.simulate import Span, Timeline

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input",
    Kind.BACKWARD_WEIGHT: "backward, weights",
}
_COLOURS = {
    Kind.FORWARD: (0, 114, 178),
    Kind.BACKWARD: (230, 159, 0),
    Kind.BACKWARD_INPUT: (213, 94, 0),
    Kind.BACKWARD_WEIGHT: (0, 158, 115),
}
IDLE = "#f0f0f0"
INK = "#222222"

# All in pixels.
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 18, 64, 40
_ROW, _GAP = 20, 3
_FONT = 10
_SWATCH = 12
# Of the bars, all ranks side by side.
_NARROWEST, _WIDEST = 640, 2_000
# More bars than this are lines of one path for each rank and colour: a twentieth of the size, without texts.
_MOST_BARS = 12_000


@dataclass(frozen=True)
class _Bar:
    """A compute in its row, lengths in pixels."""

    x: float
    width: float
    span: Span


class _Picture:
    """The layout of a picture: where everything lies and which colour it has."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        # Of each rank, the chunk of each of its stages.
        self.chunks = [
            {stage: chunk for chunk, stage in enumerate(sorted({span.action.stage for span in spans}))}
            for spans in timeline.spans
        ]
        self.num_chunks = max(map(len, self.chunks))
        lengths = [length for spans in timeline.spans for span in spans if (length := span.end - span.start) > 0]
        self.num_bars = len(lengths)
        digits = len(str(max(span.action.microbatch for spans in timeline.spans for span in spans)))
        self.label_width = digits * 0.6 * _FONT + 4
        wanted = timeline.makespan * self.label_width / min(lengths)
        self.bars_width = min(max(wanted, _NARROWEST), _WIDEST)
        self.scale = self.bars_width / timeline.makespan
        self.rows_height = len(timeline.spans) * (_ROW + _GAP) - _GAP
        self.width = _LEFT + self.bars_width + _RIGHT
        self.height = _TOP + self.rows_height + _BOTTOM

    @cached_property
    def kinds(self) -> list[Kind]:
        """The kinds of compute that the timeline has, in the order of the legend."""
        present = {span.action.kind for spans in self.timeline.spans for span in spans}
        return [kind for kind in NAMES if kind in present]

    def y_of(self, rank: int) -> float:
        return _TOP + rank * (_ROW + _GAP)

    def x_of(self, time: float) -> float:
        return _LEFT + time * self.scale

    def spans_by_colour(self, rank: int) -> dict[str, list[Span]]:
        """A rank's computes that take time, by colour, in order."""
        spans = defaultdict(list)
        colours = {
            (k, stage): colour_of(k, c, self.num_chunks) for k in self.kinds for stage, c in self.chunks[rank].items()
        }
        for span in self.timeline.spans[rank]:
            if span.end > span.start:
                spans[colours[span.action.kind, span.action.stage]].append(span)
        return spans

    def bars_by_colour(self, rank: int) -> dict[str, list[_Bar]]:
        return {
            colour: [_Bar(self.x_of(span.start), (span.end - span.start) * self.scale, span) for span in spans]
            for colour, spans in self.spans_by_colour(rank).items()
        }

    def legend(self) -> Iterator[tuple[float, list[str], str]]:
        """The x, the colours and the text of each entry."""
        x: float = _LEFT
        entries = [
            ([colour_of(k, chunk, self.num_chunks) for chunk in range(self.num_chunks)], NAMES[k]) for k in self.kinds
        ]
        for colours, text in [*entries, ([IDLE], "idle")]:
            yield x, colours, text
            x += len(colours) * _SWATCH + 6 + len(text) * 0.6 * _FONT + 14


def write_svg(timeline: Timeline, path: Path, *, title: str) -> None:
    """Writes an SVG file. Small ones tell each compute when the mouse is on it."""
    path.write_text(svg_of(timeline, title=title), encoding="utf-8")


def svg_of(timeline: Timeline, *, title: str) -> str:
    """The text of an SVG file."""
    picture = _Picture(timeline)
    width, height = math.ceil(picture.width), math.ceil(picture.height)
    described = (
        f"{len(timeline.spans)} ranks from top to bottom, time from left to right; makespan {timeline.makespan:g}, "
        f"bubble {timeline.bubble:.1%}. A later chunk of a rank is lighter; numbers are microbatches."
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-labelledby="title desc" font-family="sans-serif" font-size="{_FONT}" fill="{INK}">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="desc">{escape(described)}</desc>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for x, colours, text in picture.legend():
        for place, colour in enumerate(colours):
            lines.append(
                f'<rect x="{x + place * _SWATCH:g}" y="32" width="{_SWATCH}" height="{_SWATCH}" fill="{colour}"/>'
            )
        lines.append(f'<text x="{x + len(colours) * _SWATCH + 5:g}" y="42">{text}</text>')
    is_small = picture.num_bars <= _MOST_BARS
    for rank in range(len(timeline.spans)):
        y = picture.y_of(rank)
        lines += [
            f'<g class="rank" id="rank-{rank}">',
            f'<text x="{_LEFT - 6}" y="{y + _ROW / 2 + 3.5:g}" text-anchor="end">rank {rank}</text>',
            f'<rect class="idle" x="{_LEFT}" y="{y:g}" width="{picture.bars_width:g}" height="{_ROW}" fill="{IDLE}"/>',
            *(_svg_bars(picture, rank) if is_small else _svg_paths(picture, rank)),
            "</g>",
        ]
    lines += [*_svg_axis(picture), "</svg>", ""]
    return "\n".join(lines)


def write_png(timeline: Timeline, path: Path, *, title: str) -> None:
    """Writes a PNG file of the same picture. Raises ImportError, naming the extra, without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "writing a PNG file needs the package 'matplotlib': pip install 'lightning_megatron[plot]'"
        ) from error
    picture = _Picture(timeline)
    # At 72 dots an inch a point is a pixel; twice as many dots are for sharp screens.
    figure = Figure(figsize=(picture.width / 72, picture.height / 72), dpi=144)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    axes.axis("off")

    def write(x: float, y: float, text: str, *, size: float = _FONT, colour: str = INK, at: str = "left") -> None:
        axes.text(x, y, text, fontsize=size, color=colour, ha=at, va="center")

    write(_LEFT, 15, title, size=14)
    for x, colours, text in picture.legend():
        for place, colour in enumerate(colours):
            axes.broken_barh([(x + place * _SWATCH, _SWATCH)], (32, _SWATCH), facecolors=colour)
        write(x + len(colours) * _SWATCH + 5, 38, text)
    for rank in range(len(timeline.spans)):
        y = picture.y_of(rank)
        write(_LEFT - 6, y + _ROW / 2, f"rank {rank}", at="right")
        axes.broken_barh([(_LEFT, picture.bars_width)], (y, _ROW), facecolors=IDLE)
        for colour, bars in picture.bars_by_colour(rank).items():
            edge = 0.5 if bars[0].width > 3 else 0
            places = [(bar.x, bar.width) for bar in bars]
            axes.broken_barh(places, (y, _ROW), facecolors=colour, edgecolors="white", linewidths=edge)
            for bar in bars:
                if bar.width >= picture.label_width:
                    number = str(bar.span.action.microbatch)
                    write(bar.x + bar.width / 2, y + _ROW / 2, number, colour=ink_on(colour), at="center")
    y = _TOP + picture.rows_height + 6
    axes.broken_barh([(_LEFT, picture.bars_width)], (y, 1), facecolors=INK)
    for tick in round_moments(picture.timeline.makespan):
        axes.broken_barh([(picture.x_of(tick), 1)], (y, 5), facecolors=INK)
        write(picture.x_of(tick), y + 13, f"{tick:g}", at="center")
    write(picture.width - _RIGHT, y + 26, "time", at="right")
    figure.savefig(path, format="png")


def colour_of(kind: Kind, chunk: int, num_chunks: int) -> str:
    """The colour of a compute of one of a rank's chunks."""
    return "#" + "".join(f"{part:02x}" for part in _rgb(kind, chunk, num_chunks))


def ink_on(colour: str) -> str:
    """The colour of text on a bar: black or white, whichever stands out."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def round_moments(length: float) -> list[float]:
    """Round moments from 0 to `length`, about ten of them, for an axis of time."""
    raw = length / 10
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * min((f for f in (1, 2, 5, 10) if f * power >= raw * 0.999), default=10)
    return [step * i for i in range(math.floor(length / step * 1.000_001) + 1)]


def _svg_bars(picture: _Picture, rank: int) -> Iterator[str]:
    y = picture.y_of(rank)
    for colour, bars in picture.bars_by_colour(rank).items():
        yield f'<g fill="{colour}" stroke="white" stroke-width="0.5">'
        for bar in bars:
            hint = f"{NAMES[bar.span.action.kind]}, stage {bar.span.action.stage}, "
            hint += f"microbatch {bar.span.action.microbatch}: {bar.span.start:g} to {bar.span.end:g}"
            yield (
                f'<rect class="compute" x="{bar.x:.10g}" y="{y:g}" width="{bar.width:.10g}" height="{_ROW}">'
                f"<title>{hint}</title></rect>"
            )
        yield "</g>"
        yield f'<g fill="{ink_on(colour)}" text-anchor="middle" pointer-events="none">'
        for bar in bars:
            if bar.width >= picture.label_width:
                x = bar.x + bar.width / 2
                yield f'<text x="{x:.6g}" y="{y + _ROW / 2 + 3.5:g}">{bar.span.action.microbatch}</text>'
        yield "</g>"


def _svg_paths(picture: _Picture, rank: int) -> Iterator[str]:
    """One path for each colour, a horizontal stroke for each bar, in thousandths of a pixel."""
    y = picture.y_of(rank) + _ROW / 2
    scale = picture.scale
    for colour, spans in picture.spans_by_colour(rank).items():
        strokes, at = [], 0
        for span in spans:
            # Whole numbers, so that rounding does not add up.
            x = _LEFT + span.start * scale
            start, end = round(x * 1_000), round((x + (span.end - span.start) * scale) * 1_000)
            strokes.append(f"m{start - at} 0h{end - start}")
            at = end
        yield (
            f'<path class="computes" transform="translate(0 {y:g}) scale(.001 1)" stroke="{colour}" '
            f'stroke-width="{_ROW}" fill="none" d="M0 0{"".join(strokes)}"/>'
        )


def _svg_axis(picture: _Picture) -> Iterator[str]:
    y = _TOP + picture.rows_height + 6
    yield f'<path d="M{_LEFT} {y}h{picture.bars_width:g}" stroke="{INK}"/>'
    for tick in round_moments(picture.timeline.makespan):
        yield f'<path d="M{picture.x_of(tick):.6g} {y}v5" stroke="{INK}"/>'
        yield f'<text x="{picture.x_of(tick):.6g}" y="{y + 16}" text-anchor="middle">{tick:g}</text>'
    yield f'<text x="{picture.width - _RIGHT:g}" y="{y + 29}" text-anchor="end">time</text>'


def _rgb(kind: Kind, chunk: int, num_chunks: int) -> list[int]:
    """Lighter by chunk, up to two thirds of the way to white."""
    lightness = 0.67 * chunk / max(num_chunks - 1, 1)
    return [round(part + (255 - part) * lightness) for part in _COLOURS[kind]]
