"""`Estimate`: memory, time and FLOPs of a run, from the models of memory and time."""

from dataclasses import dataclass
from functools import cached_property

from lightning_megatron.planner.balanced_time import balanced_time
from lightning_megatron.planner.constants import Constants, fitted
from lightning_megatron.planner.flops import MODEL, Convention, step_flops
from lightning_megatron.planner.hardware import Gpu, Products
from lightning_megatron.planner.memory import Memory, memory_of
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.step_time import StepTime, step_time
from lightning_megatron.planner.trainable import trained_parameters

_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted memory, time and FLOPs of a run on GPUs of one kind."""

    run: Run
    gpu: Gpu
    memory: tuple[Memory, ...]
    """Memory by pipeline rank, first stage first."""
    time: StepTime

    @property
    def peak_bytes(self) -> float:
        """Peak memory of the fullest rank."""
        return max(rank.total for rank in self.memory)

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.time.total

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second over all GPUs."""
        return self.run.num_tokens / self.step_seconds

    def flops_per_second(self, convention: Convention = MODEL) -> float:
        """Model FLOPs a second of one GPU."""
        return step_flops(self.run, convention) / self.step_seconds / self.run.sizes.world

    @property
    def timed_as(self) -> Products:
        """Precision whose peak `share_of_peak` divides by."""
        return self.gpu.timed_as(self.run.products)

    def share_of_peak(self, convention: Convention = MODEL) -> float:
        """The convention's FLOPs over the dense peak of the precision of the products: MFU, for model FLOPs."""
        return self.flops_per_second(convention) / self.gpu.peak_flops(self.timed_as)

    def days(self, num_tokens: float) -> float:
        """Days to train on so many tokens without interruption."""
        return num_tokens / self.tokens_per_second / _SECONDS_PER_DAY

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of weights, in float32 where there are master weights, and of the trained weights' two moments."""
        low = 2 if self.run.precision == "bf16-true" else 4
        model_parts = self.run.model_parts
        return float(low * (model_parts.parameters() + 2 * trained_parameters(model_parts)))


def estimate(run: Run, gpu: Gpu, constants: Constants | None = None) -> Estimate:
    """Estimate of a run without errors."""
    constants = fitted() if constants is None else constants
    time = (step_time if run.balanced is None else balanced_time)(run, gpu, constants)
    return Estimate(run=run, gpu=gpu, memory=memory_of(run), time=time)
