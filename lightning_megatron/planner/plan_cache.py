"""Measurements of runs that are kept on disk, by all that they depend on: the run, this package's code, and torch.

A folder of them may be removed at any time.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.planner.fake_process_group import Messages
from lightning_megatron.planner.measured import Measure, Measured, RankWork, measured
from lightning_megatron.planner.memory import Memory
from lightning_megatron.planner.run import RunSettings
from lightning_megatron.planner.step_trace import Work
from lightning_megatron.planner.step_work import StepWork

_PACKAGE = Path(__file__).resolve().parents[1]


class PlanCache:
    """Measurements in a folder, which is there and can be written.

    `announce` is called before each measurement that is made.
    """

    def __init__(self, folder: Path, announce: Callable[[RunSettings], None] = lambda run: None) -> None:
        self._folder, self._announce = folder, announce

    def measured(self, run: RunSettings, trained: str = "", measure: Measure | None = None) -> Measured:
        """The measurement of a run without errors, which `measure` makes where the folder has none that can be read.

        `trained` tells what settings train from all else; a `Run` has its own model.
        """
        file = self._folder / f"{_digest(self._code, trained, repr(run))}.json"
        try:
            return _measured_of(json.loads(file.read_text()))
        except (OSError, ValueError, TypeError, KeyError):
            self._announce(run)
            found = (measure or measured)(run)
        # Whoever reads beside it sees all or nothing.
        part = file.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(_record_of(found)))
        part.replace(file)
        return found

    @cached_property
    def _code(self) -> str:
        """What the versions of this package and of torch are told apart by."""
        files = (file.read_text(encoding="utf-8") for file in sorted(_PACKAGE.rglob("*.py")))
        return _digest(torch.__version__, *files)


def _record_of(found: Measured) -> dict[str, Any]:
    """A measurement as JSON, which has no pairs as keys."""
    record = asdict(found)
    for work in (work for rank in record["ranks"] for work in rank["passes"]):
        work["messages"] = [[*key, messages] for key, messages in work["messages"].items()]
    return record


def _measured_of(record: dict[str, Any]) -> Measured:
    ranks = []
    for rank in record["ranks"]:
        forward, backward = (
            Work(**{**work, "messages": {(axis, kind): Messages(**one) for axis, kind, one in work["messages"]}})
            for work in rank["passes"]
        )
        dense, experts = rank["trained"]
        ranks.append(
            RankWork(
                passes=(forward, backward),
                trained=(dense, experts),
                num_layers=rank["num_layers"],
                step=StepWork(**rank["step"]),
            )
        )
    memory = tuple(Memory(**rank) for rank in record["memory"])
    return Measured(memory=memory, flops=record["flops"], ranks=tuple(ranks))


def _digest(*texts: str) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(hashlib.sha256(text.encode()).digest())
    return found.hexdigest()
