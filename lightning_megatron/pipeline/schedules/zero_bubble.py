"""Zero-bubble orders: the backward is cut in two, and the half that no other rank waits for fills the bubble.

`I` makes the gradient of a stage's input, which the stage before waits for; `W`
makes the gradients of its weights, and may run at any time after `I`. With p ranks, m microbatches and F, I and W of
one unit each for all that a rank holds:

| order  | makespan                           | most that a rank saves until W         |
|--------|------------------------------------|----------------------------------------|
| 1F1B   | 3m + 3(p - 1)                      | p                                      |
| ZB-H1  | max(3m + p - 1, 2m + 2p - 1)       | p                                      |
| ZB-V   | max(3m + (p - 1)/2, 2m + 2p - 1)   | 2p of half the size                    |

The second of two values holds for fewer than p microbatches (ZB-H1), for fewer than 3p/2 (ZB-V).
"""

from __future__ import annotations

from collections import defaultdict
from itertools import count

from lightning_megatron.pipeline.schedule import Action, Kind, Order, require_counts
from lightning_megatron.pipeline.schedule_spec import Formula, Schedule, ScheduleSpec
from lightning_megatron.pipeline.simulate import Costs

_Turn = tuple[Kind, int]
"""A compute and its stage, without its microbatch."""


def zb_h1(*, pp: int, microbatches: int) -> Order:
    """The ZB-H1 order, rank r holding stage r: 1F1B with each `W` r microbatches after its `I`.

    A rank saves at most min(pp, microbatches) activations, until `W`: as many as the first rank of 1F1B, on each rank.
    The bubble with F, I and W alike is (pp - 1)/(3*microbatches + pp - 1) for microbatches >= pp.
    Raises ValueError for fewer than one rank or microbatch.
    Source: Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2.1.
    """
    require_counts(pp=pp, microbatches=microbatches)
    return tuple(_numbered(_zb_h1_turns(rank, pp, max(microbatches, pp)), microbatches) for rank in range(pp))


def zb_v(*, pp: int, microbatches: int) -> Order:
    """The ZB-V order, rank r holding stages pp - 1 - r and pp + r: the model goes down the ranks and up.

    The same as in its source but for the count of the ranks, which runs backwards here, so that the last stage is on
    the last rank. A rank saves at most 2*min(pp, microbatches) activations of its half as large stages, until `W`. The
    bubble with F, I and W alike is (pp - 1)/(6*microbatches + pp - 1) for microbatches >= 3*pp // 2.
    Raises ValueError for fewer than one rank or microbatch.
    Source: Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 6; as V-ZB one of a family in
    Pipeline Parallelism with Controllable Memory (arXiv 2405.15362).
    """
    require_counts(pp=pp, microbatches=microbatches)
    return tuple(_numbered(_zb_v_turns(rank, pp, max(microbatches, 2 * pp - 1)), microbatches) for rank in range(pp))


def _zb_h1_turns(rank: int, pp: int, num: int) -> list[_Turn]:
    """For `num` microbatches, at least pp."""
    f, i, w = ((kind, rank) for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
    num_warmup = pp - 1 - rank
    return [
        *[f] * num_warmup,
        # Here the rank uses the memory that ranks before it need for their warm-up, and defers `W`.
        *[f, i] * rank,
        *[f, i, w] * (num - num_warmup - rank),
        *[i, w] * num_warmup,
        *[w] * rank,
    ]


def _zb_v_turns(rank: int, pp: int, num: int) -> list[_Turn]:
    """For `num` microbatches, at least 2*pp - 1; `down` is the stage of the first half of the model, `up` the other."""
    down, up = pp - 1 - rank, pp + rank
    f_down, i_down, w_down = ((kind, down) for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
    f_up, i_up, w_up = ((kind, up) for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
    # `down` counts the ranks that a microbatch passes before this one, on its way in and on its way out.
    return [
        # Until the first microbatch is back from the ranks at the turn of the V.
        *[f_down] * (2 * rank + 1),
        *[f_up, f_down] * down,
        # The last stages are done with a microbatch at once; the first stages still wait for its gradient.
        *[f_up, i_up, w_up] * (rank + 1),
        *[f_down, i_down, w_down, f_up, i_up, w_up] * (num - pp - rank),
        *[i_down, w_down, f_up, i_up, w_up] * rank,
        # Gradients that other ranks wait for first, what nobody waits for at the end.
        *[i_down, i_up] * down,
        *[i_down, w_down] * (rank + 1),
        *[w_up] * down,
        *[w_down] * down,
    ]


def _numbered(turns: list[_Turn], microbatches: int) -> tuple[Action, ...]:
    """The actions: every compute of a stage takes the microbatches in turn, and those that there are not fall out.

    An order stays one that runs when a microbatch is struck out on all ranks: no other microbatch waits for it.
    """
    nexts: defaultdict[_Turn, count[int]] = defaultdict(count)
    actions = [Action(kind, stage, next(nexts[kind, stage])) for kind, stage in turns]
    return tuple(action for action in actions if action.microbatch < microbatches)


def _bubble_of(rounds: int, schedule: Schedule, costs: Costs, fewest: int) -> Formula | None:
    """The formula with `rounds` stages' computes of a microbatch on a rank, where F, I and W cost the same."""
    p, m = schedule.pp, schedule.microbatches
    if not costs.forward == costs.backward_input == costs.backward_weight or m < fewest:
        return None
    return Formula(text=f"(p - 1)/({rounds} m + p - 1)", bubble=(p - 1) / (rounds * m + p - 1))


ZB_H1 = ScheduleSpec(
    name="zb_h1",
    make=lambda schedule: zb_h1(pp=schedule.pp, microbatches=schedule.microbatches),
    max_chunks=1,
    splits_backward=True,
    bubble=lambda schedule, costs: _bubble_of(3, schedule, costs, schedule.pp),
)
ZB_V = ScheduleSpec(
    name="zb_v",
    make=lambda schedule: zb_v(pp=schedule.pp, microbatches=schedule.microbatches),
    min_chunks=2,
    max_chunks=2,
    placement="v",
    splits_backward=True,
    bubble=lambda schedule, costs: _bubble_of(6, schedule, costs, 3 * schedule.pp // 2),
)
