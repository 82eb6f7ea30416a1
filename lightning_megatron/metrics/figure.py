"""The door to matplotlib: empty figures, legends, and files of figures.

Figures are made without pyplot, which would open a window system and hold every figure in memory. Files of equal
figures are equal to the byte: they carry no date and no version.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure

_METADATA: dict[str, dict[str, Any]] = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_SETTINGS: dict[Any, Any] = {
    # Text stays text, which a reader can search; paths of letters would be ten times the size.
    "svg.fonttype": "none",
    "svg.hashsalt": "lightning_megatron",
}
# Points and dots of an inch: a point is a pixel of an SVG file, and twice as many dots are for sharp screens.
_POINTS, _DOTS = 72, 144


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that size in points. Raises ImportError, naming the extra, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture needs the package 'matplotlib': pip install 'lightning_megatron[plot]'") from error
    return Figure(figsize=(width / _POINTS, height / _POINTS))


def matplotlib_faults() -> list[str]:
    """Error about a missing matplotlib; empty where pictures can be drawn."""
    try:
        new_figure(1, 1)
    except ImportError as error:
        return [str(error)]
    return []


def picture_faults(path: Path, option: str) -> list[str]:
    """Errors about a picture's file before it is drawn: its ending, its folder, and a missing matplotlib."""
    faults = []
    if path.suffix.lower() not in _METADATA:
        endings = ", ".join(_METADATA)
        name = path if path.name else "picture"
        faults.append(f"{option} ({path}) must end in one of {endings}, which picks the format; use {name}.svg")
    if not path.parent.is_dir():
        faults.append(f"{option} ({path}) lies in {path.parent}, which is no directory; make it, or use another")
    if os.path.exists(path) and not path.is_file():
        faults.append(f"{option} ({path}) cannot be written: it is a directory, a pipe or a device; name a file")
    return faults + [f"{option} ({path}): {fault}" for fault in matplotlib_faults()]


def write_figure(figure: Figure, path: Path) -> None:
    """Writes a figure, including what is outside its axes, in the format that the file's ending names."""
    from matplotlib import rc_context

    with rc_context(_SETTINGS):
        figure.savefig(
            path,
            format=path.suffix.lower().removeprefix("."),
            metadata=_METADATA[path.suffix.lower()],
            dpi=_DOTS,
            bbox_inches="tight",
            pad_inches=0.15,
        )


def add_legend(axes: Axes, entries: Mapping[str, Sequence[str]], *, num_columns: int, font_size: float) -> None:
    """Adds a legend above the axes: for each name a box of its colours, side by side."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    axes.legend(
        [tuple(Patch(facecolor=colour) for colour in colours) for colours in entries.values()],
        list(entries),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=num_columns,
        fontsize=font_size,
        frameon=False,
        borderaxespad=0.2,
        borderpad=0.2,
        columnspacing=1.4,
        handlelength=1.6,
        handletextpad=0.5,
    )
