"""`Asked`: what CONFIG and the options of a command ask for, as a run of the planner."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_megatron.context.balance import DynamicContextConfig
from lightning_megatron.planner.run import Run
from lightning_megatron.rules.cross_config import Facts


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a configuration says."""

    run: Run
    has_layout: bool
    """And not the model alone."""
    faults: tuple[str, ...] = ()
    """Of that layout, beyond those of the run."""
    notes: tuple[str, ...] = ()
    """On how it was read."""
    unplanned: Mapping[str, str] = field(default_factory=dict)
    """What it has that the planner does not know, and what that does."""
    dynamic: DynamicContextConfig | None = None
    """Of its own layout."""
    cut: Facts | None = None
    """Of a recipe: how it cuts its batches."""
