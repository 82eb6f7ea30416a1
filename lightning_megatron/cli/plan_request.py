"""`PlanRequest`: the run that CONFIG and the options of a command describe, for the planner."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_megatron.context.balance import DynamicContextConfig
from lightning_megatron.planner.run import Run
from lightning_megatron.rules.cross_config import Facts


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A run to plan, with what is known about its layout."""

    run: Run
    has_layout: bool
    """Whether the configuration has a layout of its own, and not the model alone."""
    faults: tuple[str, ...] = ()
    """Errors of that layout beyond those of the run."""
    notes: tuple[str, ...] = ()
    """Notes on how the configuration was read."""
    unplanned: Mapping[str, str] = field(default_factory=dict)
    """Options that the planner does not know, and the effect of each."""
    dynamic: DynamicContextConfig | None = None
    """Dynamic context parallelism of the recipe's own layout."""
    cut: Facts | None = None
    """How a recipe cuts its batches; None for a bare model."""
