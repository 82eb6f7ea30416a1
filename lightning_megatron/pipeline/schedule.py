"""The order of computes of every pipeline rank, as data made by pure functions.

First on the path of a step: an order is made here, `lower` adds its messages, `simulate` checks and plays it, and the
runtime executes it. Nothing here needs a stage, a tensor or a process: anyone may ask for any rank's order.

| text     | meaning                                                                          |
|----------|----------------------------------------------------------------------------------|
| `2F0`    | stage 2 runs the forward of microbatch 0                                         |
| `2B0`    | stage 2 runs the full backward of microbatch 0                                   |
| `2I0`    | dgrad: the part of that backward which makes the gradient of the stage's input   |
| `2W0`    | wgrad: the part of that backward which makes the gradients of the stage's weights |
| `2SF0`   | stage 2 sends its output to stage 3; `3RF0` is the receive at the other end      |
| `2SB0`   | stage 2 sends the gradient of its input to stage 1; `1RB0` is the receive        |
| `2RG`    | the gradients of stage 2's weights are reduced                                   |
| `2GP`    | the parameters of stage 2 are gathered                                           |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The kind of an action; the value is its text in `str(action)`."""

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
    """One thing that one rank does for one stage (a model chunk, counted over the full model) and one microbatch."""

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


def forward_chunks(*, ranks: tuple[int, ...], microbatches: int) -> Order:
    """The order of an evaluation, stage s on rank `ranks[s]`: each rank runs its stages in the order of the model, each
    over every microbatch in turn.

    Raises ValueError for fewer than one microbatch, and when a rank below the highest holds no stage.
    """
    return _all_of_each_stage(Kind.FORWARD, list(enumerate(ranks)), microbatches)


def backward_chunks(*, ranks: tuple[int, ...], microbatches: int) -> Order:
    """The order of the backwards that follow `forward_chunks`: last stage first, each over every microbatch in turn.

    Raises ValueError for fewer than one microbatch, and when a rank below the highest holds no stage.
    """
    return _all_of_each_stage(Kind.BACKWARD, list(enumerate(ranks))[::-1], microbatches)


def paired(forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int) -> tuple[Action, ...]:
    """Equally many forwards and backwards in turn: `num_warmup` forwards, then one of each, then what is left."""
    actions = list(forwards[:num_warmup])
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        actions += (forward, backward)
    actions += backwards[len(backwards) - num_warmup :]
    return tuple(actions)


def require_counts(**counts: int) -> None:
    """Raises ValueError naming all counts below 1."""
    if faults := [f"{name} ({value}) must be at least 1" for name, value in counts.items() if value < 1]:
        raise ValueError("; ".join(faults))


def _all_of_each_stage(kind: Kind, stages: list[tuple[int, int]], microbatches: int) -> Order:
    """The stages of each rank one after the other, given as (stage, rank) in that order."""
    pp = max((rank for _, rank in stages), default=-1) + 1
    require_counts(stages=len(stages), microbatches=microbatches)
    if absent := sorted(set(range(pp)) - {rank for _, rank in stages}):
        raise ValueError(f"ranks {absent} hold no stage, though rank {pp - 1} does; count ranks without gaps")
    return tuple(
        tuple(Action(kind, stage, m) for stage, at in stages if at == rank for m in range(microbatches))
        for rank in range(pp)
    )
