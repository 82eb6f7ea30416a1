"""Curves of a logged value over the optimizer steps, one line a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightning_megatron.metrics.figure import new_figure

if TYPE_CHECKING:
    from lightning_megatron.metrics.figure import Figure

Curve = Mapping[int, float]
"""A value by the number of optimizer steps after which it was taken."""

_WIDTH, _HEIGHT = 760, 420
_FONT, _TITLE_FONT = 9, 13
# Okabe's and Ito's, which the colour-blind can distinguish; further runs have them again, dashed, then dotted.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#000000")
_STYLES = ("-", "--", ":")


def curve_figure(curves: Mapping[str, Curve], *, value: str, title: str) -> Figure:
    """A figure with the curve of each run by its name; a point that has no neighbour is a dot."""
    figure = new_figure(_WIDTH, _HEIGHT)
    axes = figure.add_subplot()
    for number, (name, curve) in enumerate(curves.items()):
        steps = sorted(curve)
        axes.plot(
            steps,
            [curve[step] for step in steps],
            label=name,
            color=_COLOURS[number % len(_COLOURS)],
            linestyle=_STYLES[number // len(_COLOURS) % len(_STYLES)],
            linewidth=1.4,
            marker="o" if len(steps) == 1 else "",
        )
    axes.set_title(title, loc="left", fontsize=_TITLE_FONT)
    axes.set_xlabel("optimizer steps", fontsize=_FONT)
    axes.set_ylabel(value, fontsize=_FONT)
    axes.tick_params(labelsize=_FONT)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=_FONT, frameon=False)
    return figure
