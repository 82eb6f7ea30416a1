"""Configuration of the pipeline, and the error that lists all faults of a configuration at once."""

from collections.abc import Sequence
from dataclasses import field
from typing import Literal, get_args

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.mesh import StageLayout
from lightning_megatron.pipeline.registry import ScheduleName, default_name
from lightning_megatron.pipeline.schedule_spec import Schedule

Mode = Literal["auto", "collective"]


class ConfigurationError(ValueError):
    """Settings that cannot run, found before any training; the message lists every fault."""

    def __init__(self, faults: str | Sequence[str]) -> None:
        # Two parts of a run may find the same, as a module and its data that one path leads to nothing.
        self.faults = [faults] if isinstance(faults, str) else list(dict.fromkeys(faults))
        count = len(self.faults)
        head = "this configuration cannot run:" if count == 1 else f"this configuration has {count} faults:"
        super().__init__("\n".join([head, *(f"  - {fault}" for fault in self.faults)]))


@config_dataclass
class PipelineConfig:
    """Schedule, layout and mode of pipeline parallelism."""

    schedule: Literal["auto"] | ScheduleName = "auto"
    """Pipeline schedule of training; auto: the 1F1B schedule, in its interleaved form where
    virtual_pipeline_model_parallel_size is above 1."""
    microbatch_group_size: int = 0
    """Microbatches that go through one chunk before the next chunk's turn, for a schedule that has such groups; 0: as
    many as pipeline ranks."""
    overlap_expert_exchange: bool = False
    """Whether the forward of one microbatch runs side by side with the backward of another, for a schedule that has
    such pairs: each computes while tokens of the other are on their way to experts. Saves up to pp more microbatches
    for backward."""
    layout: StageLayout = field(default_factory=StageLayout)
    """Assignment of layers to pipeline stages."""
    mode: Mode = "auto"
    """How user steps meet the pipeline. auto: training under the schedule, one training_step per microbatch; evaluation
    as a collective of all stages. collective: training too; training_step runs once per batch on every stage, at the
    cost of all microbatches' activations. For manual optimization and for steps that call the model more than once."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"pipeline mode ({self.mode!r}) must be one of {', '.join(get_args(Mode))}")
        names = ("auto", *get_args(ScheduleName))
        if self.schedule not in names:
            raise ValueError(f"pipeline schedule ({self.schedule!r}) must be one of {', '.join(names)}")
        if self.mode == "collective":
            self._refuse_schedule()

    def _refuse_schedule(self) -> None:
        own = (
            ("schedule", self.schedule, "auto"),
            ("microbatch_group_size", self.microbatch_group_size, 0),
            ("overlap_expert_exchange", self.overlap_expert_exchange, False),
        )
        if given := [f"{name} ({value!r})" for name, value, default in own if value != default]:
            raise ValueError(
                f"{', '.join(given)} of the pipeline is for steps under a schedule, and mode 'collective' runs all "
                "forwards, then all backwards; leave it out, or use mode 'auto'"
            )

    def schedule_of(self, *, pp: int, vp: int, microbatches: int) -> Schedule:
        """The schedule of a training step of that many microbatches; it may have faults."""
        name: ScheduleName = default_name(vp) if self.schedule == "auto" else self.schedule
        return Schedule(
            name=name,
            pp=pp,
            chunks=vp,
            microbatches=microbatches,
            group_size=self.microbatch_group_size,
            is_overlapped=self.overlap_expert_exchange,
        )
