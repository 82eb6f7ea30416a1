"""How busy the experts of every layer were, as numbers for a logger and over the steps as a picture.

The picture has a row for each expert, those of a layer together, and a column for each step, or for a span of them.
E experts of a layer, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_megatron.metrics.figure import new_figure, write_figure
from lightning_megatron.moe.load import RoutingReport
from lightning_megatron.moe.load_balancing import expert_load

if TYPE_CHECKING:
    from lightning_megatron.metrics.figure import Figure

# In points. All rows share the height of a screen.
_TALLEST, _LOWEST, _WIDTH = 864, 216, 648
# From a quarter of the mean to four times it, as powers of 2.
_ENDS = 2.0


def numbers_of(reports: Mapping[str, RoutingReport], *, per_layer: bool, per_expert: bool) -> dict[str, float]:
    """Figures to log of a step: over all layers, then by layer, then by expert.

    Losses are before their coefficients, and over layers their mean. `max_load` and `min_load` are those of the
    busiest and of the idlest expert, 1 being the mean of its layer. Empty where no token was routed.
    """
    if not any(int(report.counts_E.sum()) for report in reports.values()):
        return {}
    by_layer = {layer: _numbers(report) for layer, report in reports.items()}
    layers = list(by_layer.values())
    numbers = {name: sum(layer[name] for layer in layers) / len(layers) for name in layers[0]}
    numbers["max_load"] = max(layer["max_load"] for layer in layers)
    numbers["min_load"] = min(layer["min_load"] for layer in layers)
    if per_layer:
        numbers |= {f"{layer}/{name}": value for layer, own in by_layer.items() for name, value in own.items()}
    if per_expert:
        numbers |= {
            f"{layer}/load_{expert}": value
            for layer, report in reports.items()
            for expert, value in enumerate(report.load_E.tolist())
        }
    return numbers


def _numbers(report: RoutingReport) -> dict[str, float]:
    load_E = report.load_E
    losses = {"z_loss" if name == "z" else f"balance_loss_{name}": float(v) for name, v in report.losses.items()}
    return losses | {
        "max_load": float(load_E.max()),
        "min_load": float(load_E.min()),
        "dropped_share": float(report.dropped_share),
    }


class LoadHistory:
    """The tokens of each expert over the steps of a run.

    It holds at most `num_columns` columns: when they are full, neighbours are joined, and a column is twice as long.
    """

    def __init__(self, num_columns: int = 512) -> None:
        assert num_columns % 2 == 0
        self.num_columns = num_columns
        self.layers: tuple[str, ...] = ()
        # Of each column.
        self.last_steps: list[int] = []
        # Of each column: int64 [L, E].
        self.counts: list[Tensor] = []
        # In a column that is full.
        self._num_reports = 0
        # In the last column.
        self._num_open = 0

    def add(self, step: int, reports: Mapping[str, RoutingReport]) -> None:
        """Adds the routing of a step."""
        counts_LE = torch.stack([report.counts_E.cpu() for report in reports.values()])
        self.layers = tuple(reports)
        self._num_reports = max(self._num_reports, 1)
        if 0 < self._num_open < self._num_reports:
            self.counts[-1] = self.counts[-1] + counts_LE
            self.last_steps[-1] = step
            self._num_open += 1
            return
        if len(self.counts) == self.num_columns:
            self.counts = [first + second for first, second in zip(self.counts[::2], self.counts[1::2], strict=True)]
            self.last_steps = self.last_steps[1::2]
            self._num_reports *= 2
        self.counts.append(counts_LE)
        self.last_steps.append(step)
        self._num_open = 1


def picture_of(history: LoadHistory) -> Figure:
    """A heat map of each expert's load over the steps, 1 being the mean of its layer; `history` is not empty."""
    load_SLE = torch.stack([expert_load(counts_LE, torch.float64) for counts_LE in history.counts])
    num_layers, num_experts = load_SLE.shape[1:]
    rows_RS = load_SLE.flatten(1).T
    figure = new_figure(_WIDTH, min(max(_LOWEST, 72 + 8.6 * len(rows_RS)), _TALLEST))
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    image = axes.imshow(
        # An expert without a token would be at minus infinity.
        rows_RS.clamp(min=2.0**-_ENDS, max=2.0**_ENDS).log2().numpy(),
        vmin=-_ENDS,
        vmax=_ENDS,
        cmap="RdBu_r",
        aspect="auto",
        interpolation="nearest",
    )
    for layer in range(1, num_layers):
        axes.axhline(layer * num_experts - 0.5, color="#222222", linewidth=0.6)
    # So many names that they can be read.
    every = math.ceil(num_layers / 40)
    shown = range(0, num_layers, every)
    axes.set_yticks([(layer + 0.5) * num_experts - 0.5 for layer in shown], [history.layers[i] for i in shown])
    columns = sorted({round(i * (len(history.last_steps) - 1) / 7) for i in range(8)})
    axes.set_xticks(columns, [str(history.last_steps[column]) for column in columns])
    axes.set_xlabel("optimizer step")
    axes.set_title(f"Load of the {num_experts} experts of each layer")
    bar = figure.colorbar(image, ax=axes, ticks=[-2, -1, 0, 1, 2])
    bar.ax.set_yticklabels(["1/4 or less", "1/2", "the mean", "2", "4 or more"])
    return figure


def write_picture(history: LoadHistory, path: Path) -> None:
    """Writes the picture, making its folder; the file's ending picks the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_figure(picture_of(history), path)
