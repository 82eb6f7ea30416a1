"""A plan as a picture: what every pipeline rank holds, as bars, and below it the time of one step, as SVG by hand."""

from html import escape
from pathlib import Path

from lightning_megatron.pipeline.bubble import timeline_of
from lightning_megatron.pipeline.picture import svg_of
from lightning_megatron.pipeline.simulate import Costs
from lightning_megatron.planner.estimate import Estimate
from lightning_megatron.planner.hardware import GIGA
from lightning_megatron.planner.report import layout_text

# Okabe's and Ito's colours, which the colour-blind can tell apart.
_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#f0e442", "#e69f00", "#d55e00", "#cc79a7", "#999999")
_LEFT, _TOP, _ROW, _GAP, _WIDTH = 62, 64, 16, 3, 640
_MOST_ACTIONS = 40_000
# More are not drawn: the picture would be larger than anybody can look at.


def write_plan(found: Estimate, path: Path) -> None:
    """Writes the picture of one layout."""
    path.write_text(svg_of_plan(found), encoding="utf-8")


def svg_of_plan(found: Estimate) -> str:
    """The text of an SVG file."""
    bars, height = _memory_bars(found)
    timeline, below = _timeline(found), 0.0
    if timeline:
        below = 23.0 * found.run.sizes.pp + 130
    width = _LEFT + _WIDTH + 100
    title = f"{layout_text(found.run)} on {found.run.sizes.world} x {found.gpu.name}: {found.step_seconds:.3g} s a step"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 2_100 if timeline else width)}" '
            f'height="{height + below:g}" role="img" font-family="sans-serif" font-size="10">',
            '<rect width="100%" height="100%" fill="white"/>',
            f"<title>{escape(title)}</title>",
            f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
            *bars,
            f'<g transform="translate(0 {height:g})">{timeline}</g>' if timeline else "",
            "</svg>",
        ]
    )


def _memory_bars(found: Estimate) -> tuple[list[str], float]:
    most = max(found.peak_bytes, found.gpu.memory_bytes)
    kinds = list(found.memory[0].by_kind())
    lines, x = [], float(_LEFT)
    for kind, colour in zip(kinds, _COLOURS, strict=True):
        lines.append(f'<rect x="{x:g}" y="32" width="12" height="12" fill="{colour}"/>')
        text = kind.replace("_", " ")
        lines.append(f'<text x="{x + 16:g}" y="42">{text}</text>')
        x += 26 + 6 * len(text)
    for rank, memory in enumerate(found.memory):
        y, x = _TOP + rank * (_ROW + _GAP), float(_LEFT)
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 12}" text-anchor="end">rank {rank}</text>')
        for (kind, value), colour in zip(memory.by_kind().items(), _COLOURS, strict=True):
            width = value / most * _WIDTH
            hint = f"rank {rank}, {kind.replace('_', ' ')}: {value / GIGA:.2f} GB"
            lines.append(
                f'<rect x="{x:.5g}" y="{y}" width="{width:.5g}" height="{_ROW}" fill="{colour}">'
                f"<title>{hint}</title></rect>"
            )
            x += width
        lines.append(f'<text x="{x + 4:.5g}" y="{y + 12}">{memory.total / GIGA:.1f} GB</text>')
    bottom = _TOP + len(found.memory) * (_ROW + _GAP)
    edge = _LEFT + found.gpu.memory_bytes / most * _WIDTH
    lines.append(f'<path d="M{edge:.5g} {_TOP - 4}V{bottom}" stroke="black" stroke-dasharray="4 3"/>')
    return lines, bottom + 20.0


def _timeline(found: Estimate) -> str:
    """The schedule of a batch with the seconds of a mean stage; empty where there is one rank, or too much to draw."""
    schedule, time = found.run.schedule, found.time
    if schedule.pp == 1 or 2 * schedule.pp * schedule.chunks * schedule.microbatches > _MOST_ACTIONS:
        return ""
    forward, backward = sum(time.forwards) / schedule.pp, sum(time.backwards) / schedule.pp
    half = backward / 2
    costs = Costs(forward=forward, backward=backward, backward_input=half, backward_weight=half)
    what = "step" if found.run.num_accumulated == 1 else "batch of a step"
    return svg_of(timeline_of(schedule, costs), title=f"One {what}, in seconds, with stages that are alike")
