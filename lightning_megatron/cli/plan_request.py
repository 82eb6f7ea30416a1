"""`PlanRequest`: the run that CONFIG and the options of a command describe, for the planner."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lightning_megatron.any_module.plan import ModelPlan
from lightning_megatron.context.balance import DynamicContextConfig
from lightning_megatron.planner.held_tensors import HeldTensors
from lightning_megatron.planner.measured import measured_held, measured_levels, measured_modules
from lightning_megatron.planner.run import RunSettings
from lightning_megatron.planner.step_trace import Level, Passes
from lightning_megatron.rules.cross_config import Facts

R = TypeVar("R", bound=RunSettings)


@dataclass(frozen=True, kw_only=True)
class PlanRequest(Generic[R]):
    """A run to plan, with what is known about its layout."""

    run: R
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
    plan: ModelPlan | None = None
    """How a network that knows nothing of ranks is cut, where the recipe says so."""
    cut: Facts | None = None
    """How a recipe cuts its batches; None for a bare model."""
    levels_of: Callable[[RunSettings, int], list[Level]] = measured_levels
    """Measures what a pipeline rank of the run on a layout holds in each piece of a step."""
    held_of: Callable[[RunSettings, int], list[HeldTensors]] = measured_held
    """Measures which lines of code made what a pipeline rank of the run on a layout holds at its peak."""
    modules_of: Callable[[RunSettings, int], Mapping[str, Passes]] = measured_modules
    """Measures what the modules of a pipeline rank of the run on a layout do in a forward and in a backward."""

    @property
    def all_notes(self) -> list[str]:
        """Notes on how the configuration was read, and on what is not planned of it."""
        return [*self.notes, *(f"not planned: {name}, which {does}" for name, does in self.unplanned.items())]
