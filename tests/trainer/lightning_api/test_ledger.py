"""What a run left behind, in a form that two runs can be compared by; with proof that a difference is seen.

The files `test_judge_*` each have a table `CASES` of runs. A run takes a layout and a folder and records what happened;
what it records under any layout must be what it records under Lightning's own strategy on one device.
"""

import functools
import importlib
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from tests.harness.ranks import run_on_ranks
from tests.trainer.fits import Parts, numbers, weights
from tests.trainer.layouts import PLAIN, Layout, make_trainer
from tests.trainer.modules import Data, Small

# Rounding of float64 sums in another order, through a dozen steps.
TOLERANCE = 1e-11

Record = dict[str, Any]
Case = Callable[[Layout, Path], Record]


LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(world=2, tp=2),
    "pp2": Layout(world=2, pp=2, microbatches=2),
    "pp2 m1": Layout(world=2, pp=2),
    "pp2 collective": Layout(world=2, pp=2, microbatches=2, collective=True),
    "dp2": Layout(world=2),
    "tp2 pp2 dp2": Layout(world=8, tp=2, pp=2, microbatches=2),
}


class Ledger(L.Callback):
    """Writes down each batch and epoch of every loop with the Trainer's counters, and every metric there was then."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.metrics: list[dict[str, float]] = []
        self.weights: Parts = {}

    def _write(self, trainer: L.Trainer, *what: Any) -> None:
        self.events.append((*what, trainer.current_epoch, trainer.global_step, trainer.sanity_checking))
        self.metrics.append(numbers(trainer))

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._write(trainer, "train", batch_idx, trainer.is_last_batch)

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self._write(trainer, "train epoch")

    def on_validation_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._write(trainer, "val", batch_idx, dataloader_idx)

    def on_validation_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self._write(trainer, "val epoch")

    def on_test_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._write(trainer, "test", batch_idx, dataloader_idx)

    def on_predict_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._write(trainer, "predict", batch_idx, dataloader_idx)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.weights = weights(module)


def record(trainer: L.Trainer, ledger: Ledger, **more: Any) -> Record:
    """All that a Trainer with this ledger can say about its run."""
    return {
        "events": ledger.events,
        "metrics": ledger.metrics,
        "weights": ledger.weights,
        "ended at": (trainer.current_epoch, trainer.global_step, trainer.should_stop),
        **more,
    }


def fit(
    layout: Layout,
    module: L.LightningModule | None = None,
    data: L.LightningDataModule | None = None,
    *,
    callbacks: Sequence[L.Callback] = (),
    **options: Any,
) -> Record:
    """One fit with a ledger."""
    ledger = Ledger()
    trainer = make_trainer(layout, callbacks=[*callbacks, ledger], **options)
    trainer.fit(module if module is not None else Small(), data if data is not None else Data())
    return record(trainer, ledger)


# --- running tables ---------------------------------------------------------------------------------------------------


def run_cases(table: str, names: list[str], layout: Layout, folder: Path) -> dict[str, Record]:
    """Records of each case of a module's table on this rank; an error that every rank gets is recorded too."""
    cases = importlib.import_module(table).CASES
    found: dict[str, Record] = {}
    for name in names:
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                # Advice on what cases do on purpose: one rank gives it, and as an error it would hold up the others.
                warnings.simplefilter("ignore", UserWarning)
                found[name] = cases[name](layout, folder / name)
        except Exception as error:
            found[name] = {"raised": f"{type(error).__name__}: {error}"}
    return found


@functools.cache
def _ran(table: str, names: tuple[str, ...], layout: Layout) -> list[dict[str, Record]] | Exception:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run_on_ranks(
                layout.world, run_cases, table, list(names), layout, Path(folder), init=False, timeout=120
            )
        except Exception as error:
            # Kept, so that the other cases fail at once instead of running into it again.
            return error


def ran(table: str, names: Sequence[str], layout: Layout) -> list[dict[str, Record]]:
    """[rank][case]: all cases by the same processes, one Trainer after the other."""
    found = _ran(table, tuple(names), layout)
    if isinstance(found, Exception):
        raise found
    return found


def discrepancies(
    table: str, names: Sequence[str], layout: Layout, case: str, plain_names: Sequence[str] = ()
) -> list[str]:
    """Where a case under a layout, on any rank, recorded something else than on one device.

    Records under a name that begins with `own` may differ between dp ranks. `plain_names` are the cases that run
    on one device, where they are not those that run under the layout.
    """
    [wanted] = ran(table, plain_names or names, PLAIN)
    assert "raised" not in wanted[case], wanted[case]
    found = []
    for rank, ours in enumerate(ran(table, names, layout)):
        full = wanted[case]
        if layout.dp > 1:
            full = {key: value for key, value in full.items() if not key.startswith("own ")}
            ours = {**ours, case: {k: v for k, v in ours[case].items() if not k.startswith("own ")}}
        found += [f"rank {rank}: {line}" for line in apart(ours[case], full)]
    return found


# --- comparing --------------------------------------------------------------------------------------------------------


def apart(ours: Any, wanted: Any, path: str = "told", tolerance: float = TOLERANCE) -> list[str]:
    """One line for each place where two tellings differ. Weights may be parts of whole ones."""
    if isinstance(wanted, Mapping) and isinstance(ours, Mapping):
        if path.endswith("weights"):
            return _parts_apart(ours, wanted, path, tolerance)
        lines = [f"{path} has {key!r} on one side only" for key in sorted(ours.keys() ^ wanted.keys(), key=str)]
        lines += [f"{path} raised {ours['raised']}"] if "raised" in ours else []
        return lines + [
            line for key in wanted.keys() & ours.keys() for line in apart(ours[key], wanted[key], f"{path}.{key}")
        ]
    if isinstance(wanted, (list, tuple)) and isinstance(ours, (list, tuple)):
        if len(ours) != len(wanted):
            return [f"{path} has {len(ours)} entries and not {len(wanted)}: {ours} / {wanted}"]
        pairs = zip(ours, wanted, strict=True)
        return [line for i, (a, b) in enumerate(pairs) for line in apart(a, b, f"{path}[{i}]")]
    if isinstance(wanted, Tensor) and isinstance(ours, Tensor):
        if ours.shape != wanted.shape or ours.dtype != wanted.dtype:
            return [f"{path} is {ours.dtype} {tuple(ours.shape)} and not {wanted.dtype} {tuple(wanted.shape)}"]
        if ours.numel() == 0 or torch.allclose(ours.double(), wanted.double(), rtol=0, atol=tolerance, equal_nan=True):
            return []
        return [f"{path} differs by {float((ours.double() - wanted.double()).abs().max())}"]
    if isinstance(wanted, float) and isinstance(ours, float):
        is_same = math.isclose(ours, wanted, rel_tol=0, abs_tol=tolerance) or (ours != ours and wanted != wanted)
        return [] if is_same else [f"{path} is {ours} and not {wanted}"]
    return [] if type(ours) is type(wanted) and ours == wanted else [f"{path} is {ours!r} and not {wanted!r}"]


def _parts_apart(ours: Mapping[str, Any], wanted: Mapping[str, Any], path: str, tolerance: float) -> list[str]:
    lines = [f"{path} of one device has no {name}" for name in sorted(ours.keys() - wanted.keys())]
    lines += [f"{path} is empty"] if wanted and not ours else []
    for name in sorted(ours.keys() & wanted.keys()):
        offsets, part = ours[name]
        full = wanted[name][1]
        slices = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
        lines += apart(part, full[slices], f"{path} {name}", tolerance)
    return lines


# --- the comparison sees what it shall see ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "wanted"),
    [
        ({"a": 1.0}, {"a": 1.0 + 1e-9}),
        ({"a": 1.0}, {}),
        ({}, {"a": 1.0}),
        ({"a": [1, 2]}, {"a": [1]}),
        ({"a": ("fit", 1)}, {"a": ("fit", 2)}),
        ({"a": torch.ones(2)}, {"a": torch.ones(2) * 1.001}),
        ({"a": torch.ones(2)}, {"a": torch.ones(1)}),
        ({"a": float("nan")}, {"a": 1.0}),
        ({"a": True}, {"a": 1}),
        ({"weights": {"w": ((1,), torch.ones(1))}}, {"weights": {"w": ((0,), torch.tensor([1.0, 2.0]))}}),
        ({"weights": {}}, {"weights": {"w": ((0,), torch.ones(1))}}),
        ({"raised": "an error"}, {"raised": "an error"}),
    ],
)
def test_a_difference_between_two_runs_is_reported(ours: Record, wanted: Record) -> None:
    assert apart(ours, wanted)
    if "raised" not in wanted:
        assert not apart(wanted, wanted)
