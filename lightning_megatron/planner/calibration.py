"""Constants of the time model from measured steps: those of a user's own cluster, in place of published runs'.

A measured step has parts: the forwards and the backwards of each pipeline rank, the optimizer, and the whole. The
constants c are those with the least

    sum over parts ((predicted - measured) / step / tolerance)^2  +  sum over constants (log(c / start) / spread)^2

so that a part counts by its share of the step, and a constant that no step tells of stays where it was. The least is
found by Gauss and Newton's method in the logarithms of the constants.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from lightning_megatron.planner.constants import GIVEN, Constants, most_of
from lightning_megatron.planner.run import RunSettings
from lightning_megatron.planner.step_time import StepTime

# A step that is repeated takes so much more or less, as a share of itself.
_TOLERANCE = 0.01
# The constants of one cluster are those of another within this factor's logarithm, more often than not.
_SPREAD = 0.5
_NUM_ROUNDS = 30
_DIFFERENCE = 1e-4
# A round may change a constant by such a factor's logarithm.
_MOST_CHANGE = 0.5


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds of a step and of its parts, measured or predicted."""

    forwards: tuple[float, ...]
    """All forwards of each pipeline rank, without the wait for other stages."""
    backwards: tuple[float, ...]
    optimizer: float
    step: float

    def listed(self) -> list[float]:
        """All parts, the step the last."""
        return [*self.forwards, *self.backwards, self.optimizer, self.step]


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A step that was measured, and its prediction."""

    name: str
    measured: Parts
    predict: Callable[[Constants], Parts]


def parts_of(time: StepTime, run: RunSettings) -> Parts:
    """The predicted parts of a step of equal microbatches."""
    number = run.num_accumulated * run.schedule.microbatches
    return Parts(
        forwards=tuple(number * forward.own for forward, _ in time.passes),
        backwards=tuple(number * backward.own for _, backward in time.passes),
        optimizer=time.optimizer,
        step=time.total,
    )


def calibrated(start: Constants, steps: Sequence[MeasuredStep]) -> Constants:
    """The constants that fit the measured steps."""
    names = [field.name for field in fields(Constants) if field.name not in GIVEN]
    first = torch.tensor([math.log(getattr(start, name)) for name in names], dtype=torch.float64)
    most = torch.tensor([math.log(most_of(name)) for name in names], dtype=torch.float64)

    def constants_of(logs: Tensor) -> Constants:
        return replace(start, **dict(zip(names, logs.exp().tolist(), strict=True)))

    def errors(logs: Tensor) -> Tensor:
        constants, found = constants_of(logs), []
        for one in steps:
            pairs = zip(one.predict(constants).listed(), one.measured.listed(), strict=True)
            found += [(predicted - measured) / one.measured.step / _TOLERANCE for predicted, measured in pairs]
        return torch.cat([torch.tensor(found, dtype=torch.float64), (logs - first) / _SPREAD])

    logs, error = first, errors(first)
    for _ in range(_NUM_ROUNDS):
        columns = [errors(logs + _DIFFERENCE * unit) - error for unit in torch.eye(len(names), dtype=torch.float64)]
        slopes = torch.stack(columns, dim=1) / _DIFFERENCE
        change = torch.linalg.solve(slopes.T @ slopes, -slopes.T @ error).clamp(-_MOST_CHANGE, _MOST_CHANGE)
        # The whole change, or less of it where the slopes do not reach so far.
        tried = [torch.minimum(logs + change / 2**halvings, most) for halvings in range(6)]
        least = min(tried, key=lambda other: errors(other).square().sum().item())
        found = errors(least)
        if found.square().sum() >= error.square().sum() * (1 - 1e-9):
            break
        logs, error = least, found
    return constants_of(logs)
