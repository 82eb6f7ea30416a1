"""What a rank holds at the peak of a step, tensor by tensor: the module and the line of code that made each.

A dry run in which all layers run, and as many microbatches as it takes to reach the peak. A storage is noted with the
module whose forward was running, and with the innermost line that is not torch's. What torch makes in a backward of its
own has no such line.
"""

import gc
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from lightning_megatron.planner.dry_rank import FullModel, Trained, build_rank
from lightning_megatron.planner.dry_run import (
    META,
    DryRuns,
    meta_of,
    name_tensors,
    num_needed,
    own_garbage,
    plan_of,
    program_of,
)
from lightning_megatron.planner.dry_step import DryStep
from lightning_megatron.planner.fake_process_group import Ledger, fake_mesh
from lightning_megatron.planner.memory_tracker import MemoryTracker
from lightning_megatron.planner.module_turns import ModuleTurns
from lightning_megatron.planner.run import Run, RunSettings

IN_BACKWARD = "a backward of torch"
"""Line of what torch's own backwards make."""

_COUNTERS = ("memory_tracker", "module_turns", "held_tensors", "output_shapes", "meta_kernels")
# Torch, what counts its operations, and code that is in no file.
_MACHINERY = (
    f"{Path(torch.__file__).parent}{os.sep}",
    *(str(Path(__file__).with_name(f"{name}.py")) for name in _COUNTERS),
    "<",
)
_ENGINE = "_engine_run_backward"
_PACKAGES = re.compile(r".*/site-packages/")
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class HeldTensors:
    """Tensors of one shape that one line of code made in modules of one path."""

    kind: str
    """Kind of memory, as in a dry run."""
    module: str
    """Path of the module whose forward made them, with `*` for every number; empty where none ran."""
    line: str
    """File and line, or `IN_BACKWARD`."""
    shape: tuple[int, ...]
    dtype: str
    num_tensors: int
    num_bytes: int
    """Bytes of all of them together."""


@dataclass(frozen=True)
class _Site:
    module: str
    line: str
    shape: tuple[int, ...]
    dtype: str


class _PeakWatch:
    """Which storages are there when a rank holds the most."""

    def __init__(self) -> None:
        self.turns = ModuleTurns()
        self.tracker: MemoryTracker | None = None
        self._live_bytes = self._most_bytes = 0
        self._live: dict[int, tuple[_Site, int]] = {}
        # What has come and gone since the peak: a peak takes as long as what is new since the last one.
        self._since: list[tuple[int, tuple[_Site, int] | None]] = []
        self._at_peak: dict[int, tuple[str, _Site, int]] = {}

    def made(self, key: int, tensor: Tensor, size: int) -> None:
        """Notes where a storage comes from."""
        site = _Site(self.turns.current, _line(), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        self._live[key] = site, size
        self._live_bytes += size
        self._since.append((key, (site, size)))
        if self._live_bytes > self._most_bytes:
            self._most_bytes = self._live_bytes
            self._note_peak()

    def freed(self, key: int, size: int) -> None:
        """Notes that a storage is gone."""
        del self._live[key]
        self._live_bytes -= size
        self._since.append((key, None))

    def restart(self) -> None:
        """Looks for a new peak from here on, of storages whose kinds have been named since they were made."""
        self._most_bytes = self._live_bytes
        self._at_peak.clear()
        self._since = list(self._live.items())
        self._note_peak()

    def _note_peak(self) -> None:
        assert self.tracker is not None
        for key, made in self._since:
            self._at_peak.pop(key, None)
            if made is not None:
                self._at_peak[key] = self.tracker.kind_of(key), *made
        self._since.clear()

    def found(self) -> list[HeldTensors]:
        """What was there at the peak, the most bytes first."""
        numbers = Counter((kind, site) for kind, site, _ in self._at_peak.values())
        sizes: Counter[tuple[str, _Site]] = Counter()
        for kind, site, size in self._at_peak.values():
            sizes[kind, site] += size
        return [
            HeldTensors(kind=kind, **vars(site), num_tensors=numbers[kind, site], num_bytes=size)
            for (kind, site), size in sizes.most_common()
        ]


def held_tensors(run: RunSettings, rank: int, trained: Trained | None = None) -> list[HeldTensors]:
    """Tensors that a global rank holds at the peak of a step, the most bytes first. The run must have no errors, and
    microbatches that are alike; a `Run` has its own model."""
    if trained is None:
        assert isinstance(run, Run), "settings alone do not say what is trained"
        trained = FullModel(run)
    assert run.balanced is None, "microbatches differ"
    count = min(run.num_microbatches, num_needed(run))
    watch, ledger = _PeakWatch(), Ledger()
    tracker = watch.tracker = MemoryTracker(META, watch)
    told = DryRuns(run, trained).told_on(rank)
    with fake_mesh(run.sizes, rank, ledger, told) as (mesh, new_group), tracker, own_garbage():
        own = build_rank(run, mesh, new_group, META, trained)
        watch.turns.follow(own.module)
        step = DryStep(own, meta_of(own), tracker, ledger, [], is_shallow=False)
        cells = {(chunk, number) for chunk in range(len(mesh.own_stages)) for number in range(count)}
        name_tensors(tracker, own)
        step.take(program_of(plan_of(run, 1), mesh, cells), 1)
        name_tensors(tracker, own)
        # What cycles of the first step still hold, a longer run would not.
        gc.collect()
        watch.restart()
        step.take(program_of(plan_of(run, count), mesh, cells), count)
        return watch.found()


def _line() -> str:
    """The line that runs. Its locals are not asked for: a frame would hold them from then on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code.co_name == _ENGINE:
            return IN_BACKWARD
        if not file.startswith(_MACHINERY):
            return f"{_short(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _short(file: str) -> str:
    """A file's path from its package's folder on."""
    short = _PACKAGES.sub("", file)
    return str(Path(short).relative_to(_ROOT)) if Path(short).is_relative_to(_ROOT) else short
