"""`Estimate`: memory, time and FLOPs of a run, from measured memory and modelled time.

Of the package's models the time model has formulas; any other is timed by what was measured.
"""

from dataclasses import dataclass
from functools import cached_property

from lightning_megatron.planner.balanced_time import balanced_time
from lightning_megatron.planner.constants import Constants, fitted
from lightning_megatron.planner.flops import step_flops
from lightning_megatron.planner.framework_profile import OURS
from lightning_megatron.planner.hardware import Gpu, Products
from lightning_megatron.planner.measured import Measure, Measured, RankWork, measured
from lightning_megatron.planner.measured_time import measured_time
from lightning_megatron.planner.memory import Memory, memory_of
from lightning_megatron.planner.model_size import ModelSize, size_of
from lightning_megatron.planner.run import Run, RunSettings
from lightning_megatron.planner.step_time import StepTime, step_time
from lightning_megatron.planner.time_range import Effect, Ratios, largest_effects, ratios_like

_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted memory, time and FLOPs of a run on GPUs of one kind."""

    run: RunSettings
    size: ModelSize
    gpu: Gpu
    memory: tuple[Memory, ...]
    """Memory by pipeline rank, first stage first."""
    ranks: tuple[RankWork, ...]
    """What each pipeline rank does; empty where not measured."""
    executed_flops: float | None
    """FLOPs of a step on all GPUs as the package's own code executes them, needed or not; None where not measured."""
    constants: Constants
    """Constants of the time model."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of layers of each pipeline rank; empty where not measured."""
        return tuple(rank.num_layers for rank in self.ranks)

    @cached_property
    def time(self) -> StepTime:
        """Time of a step, by what takes it."""
        return self.time_of(self.constants)

    def time_of(self, constants: Constants) -> StepTime:
        """Time of a step with other constants."""
        run = self.run
        if not isinstance(run, Run):
            return measured_time(run, self.ranks, self.gpu, constants)
        return (step_time if run.balanced is None else balanced_time)(run, self.gpu, constants)

    @property
    def ratios(self) -> Ratios | None:
        """Stated over predicted step times of published runs like this one; None with constants of the GPU's own, of
        which they say nothing."""
        if self.constants != fitted():
            return None
        precision = {"fp8": "FP8", "half": "16 bits", "full": "float32", "double": "float64"}[self.timed_as]
        of_experts = any(rank.trained[1] for rank in self.ranks)
        has_experts = bool(self.size.active) or self.size.num_experts > 1 or of_experts
        return ratios_like(self.gpu.family, precision, has_experts=has_experts)

    @cached_property
    def effects(self) -> list[Effect]:
        """The constants of the time model that the step's time depends on most."""
        return largest_effects(lambda constants: self.time_of(constants).total, self.constants)

    @property
    def peak_bytes(self) -> float:
        """Peak memory of the fullest rank."""
        return self.memory[self.fullest].total

    @property
    def fullest(self) -> int:
        """Pipeline rank with the most memory."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.time.total

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second over all GPUs."""
        return self.run.num_tokens / self.step_seconds

    @cached_property
    def _flops(self) -> float:
        """FLOPs of a step, causal attention half: model FLOPs of the package's models, executed ones of others."""
        return step_flops(self.run) if isinstance(self.run, Run) else self.executed_flops or 0.0

    def flops_per_second(self, flops: float | None = None) -> float:
        """FLOPs a second of one GPU that makes its share of so many in a step. Where none are given they are model
        FLOPs, or, of a model that is not the package's, executed ones."""
        return (self._flops if flops is None else flops) / self.step_seconds / self.run.sizes.world

    @property
    def timed_as(self) -> Products:
        """Precision whose peak `share_of_peak` divides by."""
        return self.gpu.timed_as(self.run.products)

    def share_of_peak(self, flops: float | None = None) -> float:
        """So many FLOPs over the dense peak of the precision of the products: MFU, for model FLOPs."""
        return self.flops_per_second(flops) / self.gpu.peak_flops(self.timed_as)

    def days(self, num_tokens: float) -> float:
        """Days to train on so many tokens without interruption."""
        return num_tokens / self.tokens_per_second / _SECONDS_PER_DAY

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of weights, in float32 where there are master weights, and of the trained weights' two moments."""
        return float(self.run.stepped_bytes * (self.size.parameters + 2 * self.size.trained))


def estimate(
    run: RunSettings,
    gpu: Gpu,
    constants: Constants | None = None,
    *,
    measure: Measure = measured,
    size: ModelSize | None = None,
) -> Estimate:
    """Estimate of a run without errors. A `Run` has its own `size`. Memory of frameworks other than this package is
    that of the closed form."""
    if isinstance(run, Run):
        size = size_of(run)
        found = measure(run) if run.framework == OURS else Measured(memory=memory_of(run), flops=None)
    else:
        assert size is not None, "settings alone do not say what is trained"
        found = measure(run)
    return Estimate(
        run=run,
        size=size,
        gpu=gpu,
        memory=found.memory,
        ranks=found.ranks,
        executed_flops=found.flops,
        constants=gpu.constants if constants is None else constants,
    )
