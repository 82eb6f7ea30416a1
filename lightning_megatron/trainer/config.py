"""What a user sets on the strategy beyond the sizes, and the error that tells all faults of it at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Mode = Literal["auto", "collective"]


class ConfigurationError(ValueError):
    """Settings that cannot run, found before any training; the message lists every fault."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = list(faults)
        head = "this configuration cannot run:" if len(faults) == 1 else f"this configuration has {len(faults)} faults:"
        super().__init__("\n".join([head, *(f"  - {fault}" for fault in faults)]))


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How pipeline parallelism runs."""

    mode: Mode = "auto"
    # auto: training under 1F1B, one training_step per microbatch; evaluation as a collective of all stages.
    # collective: training too; training_step runs once per batch on every stage, at the cost of all microbatches'
    # activations. For manual optimization and for steps that call the model more than once.

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"pipeline mode ({self.mode!r}) must be one of {', '.join(get_args(Mode))}")
