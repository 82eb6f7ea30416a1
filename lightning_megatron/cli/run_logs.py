"""Curves of logged values, read from what loggers write: the door to TensorBoard's reader.

| logger | its file |
|---|---|
| `CSVLogger` | `metrics.csv` |
| `TensorBoardLogger` | `events.out.tfevents.*` |

A run is such a file, or a folder with it; a folder with folders of runs stands for all of them. Loggers number a value
by the steps before it; here it has the number of optimizer steps that were made.
"""

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_megatron.cli.usage import UsageError
from lightning_megatron.metrics.curve_figure import Curve

_CSV, _EVENTS = "metrics.csv", "events.out.tfevents.*"
# Columns of a CSV file that are no values.
_PLACES = ("step", "epoch", "")


def read_curves(runs: Sequence[Path], value: str) -> dict[str, Curve]:
    """The curve of a value by the path of its run. Raises UsageError with all runs that have none."""
    curves: dict[str, Curve] = {}
    faults = []
    for run in runs:
        found = list(_logs_of(run))
        if not run.exists():
            faults.append(f"{run} does not exist; name a run's folder, or the file of its log")
        elif not found:
            faults.append(f"{run} has no {_CSV} and no {_EVENTS}; name a run's folder or its file")
        for name, file in found:
            values = _csv_values(file) if file.suffix == ".csv" else _event_values(file.parent)
            if value in values:
                curves[str(name)] = values[value]
            elif values:
                faults.append(f"{name} has no {value!r}; it has {', '.join(values)}: take one by --value")
            else:
                faults.append(f"{name} has no values; name a run's folder, or the file of its log")
    if faults:
        raise UsageError(faults)
    return curves


def _logs_of(run: Path) -> Iterator[tuple[Path, Path]]:
    """The name of each run that the path stands for, and a file of its log."""
    if run.is_file():
        yield run, run
        return
    files = [*run.rglob(_CSV), *run.rglob(_EVENTS)]
    # A run that was resumed has several files of events in one folder, which are read together.
    for folder in sorted({file.parent for file in files}):
        yield folder, next(file for file in files if file.parent == folder)


def _csv_values(file: Path) -> dict[str, Curve]:
    values: dict[str, dict[int, float]] = {}
    try:
        with file.open(newline="") as stream:
            for row in csv.DictReader(stream):
                for name in row.keys() - {*_PLACES, None}:
                    if row[name]:
                        values.setdefault(name, {})[int(row["step"]) + 1] = float(row[name])
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise UsageError([f"{file} is no log of Lightning's CSVLogger ({error!r}); name its {_CSV}"]) from error
    return dict(sorted(values.items()))


def _event_values(folder: Path) -> dict[str, Curve]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise UsageError(
            [f"{folder} has files of TensorBoard, which its package reads: pip install tensorboard"]
        ) from error
    # All points of a curve, and not a sample of them.
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    names = sorted(set(events.Tags()["scalars"]) - {"epoch", "hp_metric"})
    return {
        name: {
            event.step + 1: event.value
            for event in events.Scalars(name)
            # The logger writes one where a run begins.
            if not math.isnan(event.value)
        }
        for name in names
    }
