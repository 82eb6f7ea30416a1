"""What an optimizer's step holds and multiplies, measured on tensors without numbers: its own code runs.

The states of a rank are measured with all else (`dry_run`); a closed form and the time model take them by the number.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer


class MakeOptimizer(Protocol):
    """Makes the optimizer of a rank's part of a model. A value, whose text tells all that the optimizer depends on."""

    def __call__(self, module: nn.Module) -> Optimizer:
        """The optimizer of the parameters of a module."""
        ...


@dataclass(frozen=True)
class PlainAdamW:
    """Makes AdamW of all parameters, with torch's settings."""

    def __call__(self, module: nn.Module) -> Optimizer:
        """The optimizer of the parameters of a module."""
        return AdamW(module.parameters())


PLAIN_ADAMW = PlainAdamW()


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What an optimizer's step takes for each number of a weight that it steps."""

    states: float = 2.0
    """Numbers of states that are as large as a weight: AdamW has two moments."""
    flops: float = 0.0
    """FLOPs of matrix products."""


def choose_foreach(optimizer: Optimizer) -> None:
    """Lets an optimizer step all parameters of a group at once, as the strategy does on a GPU, where its user has not
    said otherwise."""
    # The strategy chooses fused kernels too, which take no tensors without numbers.
    # Those of foreach hold a root of each second moment, so that the peak of a step is no less.
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not (group.get("fused") or group.get("differentiable")):
            group["foreach"] = True


def states_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Tensors of an optimizer's state, which exist after its first step."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def step_work(states: Iterable[Tensor], num_stepped: int, flops: float) -> StepWork:
    """The work of a step of so many numbers, which makes these states and multiplies by so many FLOPs."""
    number = sum(one.numel() for one in states if one.dim())
    return StepWork(states=number / max(num_stepped, 1), flops=flops / max(num_stepped, 1))
