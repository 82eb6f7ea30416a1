"""Fits that led to a checkpoint: they show whether a later checkpoint is of the same training or of another.

A fit has an id, drawn when it begins, and the number of optimizer steps that it began after. A run that goes on from a
checkpoint has that one's fits and its own; a checkpoint holds those of the run that saved it.

    fit a   0 ──── 3 ──── 6 ──── 9         9 goes on from 3 and from 6
    fit b          └───── 6 ──── 9         from 3 of fit a, and not from its 6
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_megatron.comm.collectives import broadcast_object
from lightning_megatron.mesh import Axis

KEY = "lightning_megatron_fits"
"""Under which Lightning's dictionary holds the fits."""

FitHistory = list[tuple[str, int]]
"""Id of each fit and the number of optimizer steps that it began after; the first fit first."""


def begun(before: FitHistory, step: int, world: Axis) -> FitHistory:
    """The fits of a run that begins now, after those before it. Collective."""
    new_id: str = broadcast_object(uuid.uuid4().hex[:16] if world.is_first else None, world)
    return [*before, (new_id, step)]


def fits_of(meta: Mapping[str, Any]) -> FitHistory:
    """Fits that led to a checkpoint; empty where it does not say."""
    return [(str(one), int(step)) for one, step in meta.get(KEY, ())]


def goes_on_from(later: Sequence[tuple[str, int]], earlier: Sequence[tuple[str, int]], step: int) -> bool:
    """Whether a run of the fits `later` was once where a run of the fits `earlier` was after so many steps."""
    if not earlier or list(later[: len(earlier)]) != list(earlier):
        return False
    return len(later) == len(earlier) or later[len(earlier)][1] >= step
