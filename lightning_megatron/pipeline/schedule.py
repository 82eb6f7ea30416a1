"""The order of computes of every pipeline rank, as data made by pure functions.

First on the path of a step: an order is made here, `lower` adds its messages, `simulate` checks and plays it, and the
runtime executes it. Nothing here needs a stage, a tensor or a process: anyone may ask for any rank's order.

| text     | meaning                                                                          |
|----------|----------------------------------------------------------------------------------|
| `2F0`    | stage 2 runs the forward of microbatch 0                                         |
| `2B0`    | stage 2 runs the whole backward of microbatch 0                                  |
| `2I0`    | the half of that backward which makes the gradient of the stage's input          |
| `2W0`    | the half of that backward which makes the gradients of the stage's weights       |
| `2SF0`   | stage 2 sends its output to stage 3; `3RF0` is the receive at the other end      |
| `2SB0`   | stage 2 sends the gradient of its input to stage 1; `1RB0` is the receive        |
| `2RG`    | the gradients of stage 2's weights are reduced                                   |
| `2GP`    | the parameters of stage 2 are gathered                                           |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What an action does. The value is its text in `str(action)`."""

    # Members are single objects. Enum's own hash is Python code, and a checked plan looks up half a million kinds.
    __hash__ = object.__hash__

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SF"
    RECV_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECV_BACKWARD = "RB"
    REDUCE_GRADS = "RG"
    GATHER_PARAMS = "GP"


COMPUTES = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
MESSAGES = frozenset({Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD})

# The microbatch of an action that concerns a stage as a whole: REDUCE_GRADS, GATHER_PARAMS.
WHOLE_STAGE = -1


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that one rank does for one stage (a model chunk, counted over the whole model) and one microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        microbatch = "" if self.microbatch == WHOLE_STAGE else self.microbatch
        return f"{self.stage}{self.kind.value}{microbatch}"


Order = tuple[tuple[Action, ...], ...]
"""The computes of every pp rank, in the order in which the rank runs them."""


class ScheduleError(RuntimeError):
    """An order or a plan that cannot run to its end."""


def one_f_one_b(*, pp: int, microbatches: int) -> Order:
    """The 1F1B order, rank r holding stage r: forwards to fill the pipeline, then one forward one backward, then the
    backwards that are left.

    Rank r keeps at most min(pp - r, microbatches) activations; the bubble is (pp - 1)/(microbatches + pp - 1).
    Raises ValueError for fewer than one rank or microbatch.
    Source: Narayanan et al. 2021, Memory-Efficient Pipeline-Parallel DNN Training (PipeDream-Flush), section 2.2.
    """
    _require_counts(pp, microbatches)
    return tuple(_one_f_one_b_of(rank, min(pp - rank - 1, microbatches), microbatches) for rank in range(pp))


def forward_only(*, pp: int, microbatches: int) -> Order:
    """The order of an evaluation, rank r holding stage r: every microbatch forward, in turn.

    Raises ValueError for fewer than one rank or microbatch.
    """
    _require_counts(pp, microbatches)
    return tuple(tuple(Action(Kind.FORWARD, rank, m) for m in range(microbatches)) for rank in range(pp))


def backward_only(*, pp: int, microbatches: int) -> Order:
    """The order of the backwards that follow `forward_only`, every microbatch in turn.

    Raises ValueError for fewer than one rank or microbatch.
    """
    _require_counts(pp, microbatches)
    return tuple(tuple(Action(Kind.BACKWARD, rank, m) for m in range(microbatches)) for rank in range(pp))


def _one_f_one_b_of(stage: int, num_warmup: int, microbatches: int) -> tuple[Action, ...]:
    actions = [Action(Kind.FORWARD, stage, m) for m in range(num_warmup)]
    for m in range(num_warmup, microbatches):
        actions.append(Action(Kind.FORWARD, stage, m))
        actions.append(Action(Kind.BACKWARD, stage, m - num_warmup))
    actions += [Action(Kind.BACKWARD, stage, m) for m in range(microbatches - num_warmup, microbatches)]
    return tuple(actions)


def _require_counts(pp: int, microbatches: int) -> None:
    faults = [
        f"{name} ({value}) must be at least 1"
        for name, value in (("pp", pp), ("microbatches", microbatches))
        if value < 1
    ]
    if faults:
        raise ValueError("; ".join(faults))
