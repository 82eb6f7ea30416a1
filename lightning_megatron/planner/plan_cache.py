"""Measurements of runs that are kept on disk, by all that they depend on: the run, this package's code, and torch.

A folder of them may be removed at any time.
"""

import hashlib
import json
import os
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import torch

from lightning_megatron.planner.measured import Measured, measured
from lightning_megatron.planner.memory import Memory
from lightning_megatron.planner.run import Run

_PACKAGE = Path(__file__).resolve().parents[1]


class PlanCache:
    """Measurements in a folder, which is there and can be written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def measured(self, run: Run) -> Measured:
        """The measurement of a run without errors, which is made where the folder has none that can be read."""
        file = self._folder / f"{_digest(self._code, repr(run))}.json"
        try:
            record = json.loads(file.read_text())
            return Measured(memory=tuple(Memory(**rank) for rank in record["memory"]), flops=record["flops"])
        except (OSError, ValueError, TypeError, KeyError):
            found = measured(run)
        # Whoever reads beside it sees all or nothing.
        part = file.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(asdict(found)))
        part.replace(file)
        return found

    @cached_property
    def _code(self) -> str:
        """What the versions of this package and of torch are told apart by."""
        files = (file.read_text(encoding="utf-8") for file in sorted(_PACKAGE.rglob("*.py")))
        return _digest(torch.__version__, *files)


def _digest(*texts: str) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(hashlib.sha256(text.encode()).digest())
    return found.hexdigest()
