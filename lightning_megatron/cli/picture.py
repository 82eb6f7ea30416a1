"""The option `--out` of commands that draw: its help, its errors before anything runs, and its file."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_megatron.cli.usage import UsageError
from lightning_megatron.metrics.figure import picture_faults, write_figure
from lightning_megatron.metrics.timeline_figure import AreaPanel, Panel, timeline_figure

if TYPE_CHECKING:
    from lightning_megatron.metrics.figure import Figure

_OPTION = "--out"


def add_out(group: "argparse._ArgumentGroup", what: str) -> None:
    """Adds the option; `what` is what the picture shows."""
    group.add_argument(
        _OPTION,
        type=Path,
        metavar="FILE",
        help=f"write a picture of {what}: FILE.svg, FILE.png or FILE.pdf (extra 'plot')",
    )


def out_faults(path: Path | None) -> list[str]:
    """Errors about the option's value; none where it is left out."""
    return [] if path is None else picture_faults(path, _OPTION)


def write_picture(path: Path, panels: Sequence[Panel | AreaPanel], *, title: str) -> None:
    """Writes a picture of panels. Raises UsageError where the file cannot be written."""
    save_picture(path, timeline_figure(panels, title=title))


def save_picture(path: Path, figure: "Figure") -> None:
    """Writes a figure. Raises UsageError where the file cannot be written."""
    try:
        write_figure(figure, path)
    except OSError as error:
        raise UsageError(
            [f"{_OPTION} ({path}) cannot be written: {error.strerror or error}; use another path"]
        ) from error
