"""`Estimate`: what a run would need and how fast it would be, from the models of memory and time."""

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
    """Of one run on GPUs of one kind."""

    run: Run
    gpu: Gpu
    memory: tuple[Memory, ...]
    """By pipeline rank, the first stage's first."""
    time: StepTime

    @property
    def peak_bytes(self) -> float:
        """Of the rank that holds the most."""
        return max(rank.total for rank in self.memory)

    @cached_property
    def step_seconds(self) -> float:
        return self.time.total

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs together."""
        return self.run.num_tokens / self.step_seconds

    def flops_per_second(self, convention: Convention = MODEL) -> float:
        """Of one GPU."""
        return step_flops(self.run, convention) / self.step_seconds / self.run.sizes.world

    @property
    def timed_as(self) -> Products:
        """Whose peak `share_of_peak` divides by."""
        return self.gpu.timed_as(self.run.products)

    def share_of_peak(self, convention: Convention = MODEL) -> float:
        """The convention's FLOPs over the dense peak of the precision of the products: MFU, for model FLOPs."""
        return self.flops_per_second(convention) / self.gpu.peak_flops(self.timed_as)

    def days(self, num_tokens: float) -> float:
        """To train on so many tokens, with no interruption."""
        return num_tokens / self.tokens_per_second / _SECONDS_PER_DAY

    @property
    def checkpoint_bytes(self) -> float:
        """Of weights in float32, where they have master weights, and two moments of those that are trained."""
        low = 2 if self.run.precision == "bf16-true" else 4
        model_parts = self.run.model_parts
        return float(low * (model_parts.parameters() + 2 * trained_parameters(model_parts)))


def estimate(run: Run, gpu: Gpu, constants: Constants | None = None) -> Estimate:
    """The estimate of a run without faults."""
    constants = fitted() if constants is None else constants
    time = (step_time if run.balanced is None else balanced_time)(run, gpu, constants)
    return Estimate(run=run, gpu=gpu, memory=memory_of(run), time=time)
